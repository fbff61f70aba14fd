"""Classify texts, pairs of texts, or images: every label with its probability.

B texts or images, T tokens, C labels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.data.ragged import Ids, lengths_if_padded, pad_ids
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.models.base import Batch, Model, TruncationWarning
from heedful.models.encoder import has_segments
from heedful.models.vit import ViT
from heedful.observe.inputs import scale_images
from heedful.tasks.drawing import prepare_drawing, reads_drawings
from heedful.tasks.embed import MAX_BATCH, batch_by_length
from heedful.text.blank import is_blank
from heedful.text.plural import counted
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown
from heedful.text.warn import warn


@dataclass(frozen=True)
class Label:
    """A label and how likely it is."""

    name: str
    score: float  # a probability; of a regression, the number itself


def predict_labels(
    model: Model,
    tokenizer: Tokenizer | None,
    what: str | Sequence[str] | Tensor,
    second: str | Sequence[str] | None = None,
) -> list[Label] | list[list[Label]]:
    """The labels of a text, a pair of texts or an image; of several texts or pairs, a list for each."""
    if isinstance(model, ViT):
        if not isinstance(what, Tensor):
            raise ValueError("a vision model classifies images: give a tensor (channels, height, width) from -1 to 1")
        return classify_images(model, what[None])[0]
    if isinstance(what, Tensor):
        raise ValueError("this model classifies texts, not tensors")
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give it token ids yourself")
    if isinstance(what, str) and (second is None or isinstance(second, str)):
        return classify_texts(model, tokenizer, [what], None if second is None else [second])[0]
    if isinstance(what, str) or isinstance(second, str) or (second is not None and len(second) != len(what)):
        raise ValueError("a pair is two texts; for several pairs give two lists of the same length")
    return classify_texts(model, tokenizer, what, second)


@torch.no_grad()
def classify_texts(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], seconds: Sequence[str] | None = None
) -> list[list[Label]]:
    """The labels of each text, or of each pair with one of `seconds`, likeliest first. What is longer than the model's
    context is cut as in training, with a warning."""
    rows, segments = _tokenize(model, tokenizer, texts, seconds)
    found: list[list[Label]] = [[]] * len(rows)
    for batch in batch_by_length([len(row) for row in rows], MAX_BATCH):
        chosen = [rows[i] for i in batch]
        lengths = lengths_if_padded(chosen)
        sides = None if segments is None else pad_ids([segments[i] for i in batch], 0).to(model.device)
        lengths = None if lengths is None else lengths.to(model.device)
        inputs = Batch(pad_ids(chosen, 0).to(model.device), lengths, segments=sides)
        for i, labels in zip(batch, _labels(model, inputs), strict=True):
            found[i] = labels
    return found


@torch.no_grad()
def classify_images(model: Model, images: Tensor) -> list[list[Label]]:
    """The labels of images (B, channels, height, width), floats from -1 to 1 or uint8, likeliest first."""
    if reads_drawings(model):
        images = torch.stack([prepare_drawing(model, image) for image in images])
    return _labels(model, Batch(images=scale_images(images).to(model.device)))


def _labels(model: Model, batch: Batch) -> list[list[Label]]:
    logits = model(batch).logits
    assert logits is not None, "the ability promises a head"
    config, logits = model.config, logits.float()  # (B, C)
    names = config.labels or [str(i) for i in range(config.n_labels)]
    if config.problem == "regression":
        return [[Label(name, x) for name, x in zip(names, row, strict=True)] for row in logits.tolist()]
    multi_label = config.problem == "multi_label_classification"
    scores = logits.sigmoid() if multi_label else logits.softmax(dim=-1)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return [[Label(names[i], float(row[i])) for i in best] for row, best in zip(scores, order.tolist(), strict=True)]


def _tokenize(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], seconds: Sequence[str] | None
) -> tuple[list[Ids], list[Ids] | None]:
    """The token ids of each text or pair with its special tokens, and the segments of pairs if the model has any."""
    template, limit = SpecialTokenTemplate(tokenizer), model.context_length
    first = _encode(tokenizer, texts)
    if seconds is None:
        n_tokens = [len(a) + len(template.before) + len(template.after) for a in first]
        rows, segments = [template.wrap(a, limit) for a in first], None
    else:
        second = _encode(tokenizer, seconds)
        n_tokens = [len(a) + len(b) + template.n_pair for a, b in zip(first, second, strict=True)]
        both = [template.wrap_pair(a, b, limit) for a, b in zip(first, second, strict=True)]
        rows = [ids for ids, _ in both]
        segments = [sides for _, sides in both] if has_segments(model) and template.has_segments else None
    for n in n_tokens:
        if limit is not None and n > limit:
            warn(cut_note(n, limit), TruncationWarning)
    return list(rows), None if segments is None else list(segments)


def cut_note(n_tokens: int, limit: int) -> str:
    """What a user is told of a text that is longer than the context length `limit`."""
    return f"the text has {counted(n_tokens, 'token')}, and this model reads {limit}: its end is cut"


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text; ValueError for one that has nothing to read."""
    rows = tokenizer.encode_batch(texts)
    for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
        if not row or is_blank(text):
            which = f"text {i}" if len(texts) > 1 else "the text"
            raise ValueError(f"{which} is empty: give a text to classify")
    warn_if_unknown(tokenizer, texts)
    return rows
