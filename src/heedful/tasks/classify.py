"""Classify a text, a pair of texts, or an image: every label with its probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.models.base import Batch, Model
from heedful.models.vit import ViT
from heedful.observe.inputs import has_segments
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown


@dataclass(frozen=True)
class Label:
    """A label and how likely it is."""

    name: str
    score: float  # a probability; of a regression, the number itself


@torch.no_grad()
def predict_labels(
    model: Model, tokenizer: Tokenizer | None, what: str | Tensor, second: str | None = None
) -> list[Label]:
    """Every label with its probability, likeliest first; `what` is a text, or an image (C, height, width), -1 to 1."""
    if isinstance(model, ViT):
        if not isinstance(what, Tensor):
            raise ValueError("a vision model classifies images: give a tensor (channels, height, width) from -1 to 1")
        batch = Batch(images=what[None].to(model.device))
    else:
        if not isinstance(what, str):
            raise ValueError("this model classifies texts, not tensors")
        batch = _encode(model, tokenizer, what, second)
    logits = model(batch).logits
    assert logits is not None, "the ability promises a head"
    config = model.config
    names = config.labels or [str(i) for i in range(config.n_labels)]
    if config.problem == "regression":
        return [Label(name, value) for name, value in zip(names, logits[0].tolist(), strict=True)]
    multi_label = config.problem == "multi_label_classification"
    scores = logits[0].float().sigmoid() if multi_label else logits[0].float().softmax(dim=-1)
    return [Label(names[i], float(scores[i])) for i in scores.argsort(descending=True, stable=True).tolist()]


def _encode(model: Model, tokenizer: Tokenizer | None, text: str, second: str | None) -> Batch:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give it token ids yourself")
    warn_if_unknown(tokenizer, [text, second or ""])
    segments = None
    if second is None:
        ids = tokenizer.encode(text, add_special=True)
    else:
        ids, sides = tokenizer.encode_pair(text, second)
        segments = torch.tensor([sides], device=model.device) if has_segments(model) and any(sides) else None
    model.check_length(len(ids))
    return Batch(torch.tensor([ids], device=model.device), segments=segments)
