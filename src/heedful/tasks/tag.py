"""Token classification: the entities of a text; with tags of another kind, as parts of speech, every word.

A text that is longer than the model's context is read in overlapping windows, and a token of two windows has its tag
from the one where it is farther from the edge.

    B windows, T tokens, C labels
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from heedful.data.dataset import IGNORED
from heedful.data.ragged import lengths_if_padded, pad_ids
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.data.tagging import tokenize_tagged_words
from heedful.models.base import Batch
from heedful.models.encoder import EncoderModel
from heedful.tasks.embed import MAX_BATCH, batch_by_length
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown


@dataclass(frozen=True)
class TaggedSpan:
    """An entity or a word, text[begin:end], and its label without B- or I-."""

    text: str
    begin: int
    end: int
    score: float  # a probability; of several words, the lowest of theirs
    label: str


@torch.no_grad()
def tag_texts(model: EncoderModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[TaggedSpan]]:
    """The labelled spans of each text in order; a word has the label of its first token, "O" is left out."""
    words = [list(re.finditer(r"\w+|[^\w\s]", text)) for text in texts]
    warn_if_unknown(tokenizer, [text for text, found in zip(texts, words, strict=True) if found])
    labels = label_words(model, tokenizer, [[match.group() for match in found] for found in words])
    return [_spans(*parts) for parts in zip(texts, words, labels, strict=True)]


def _spans(text: str, words: Sequence[re.Match[str]], labels: Mapping[int, tuple[str, float]]) -> list[TaggedSpan]:
    spans: list[TaggedSpan] = []
    previous = -1  # the last word with a label
    for word, (name, score) in labels.items():
        if name == "O":
            continue
        match, label = words[word], name.removeprefix("B-").removeprefix("I-")
        if name.startswith("I-") and spans and spans[-1].label == label and previous == word - 1:
            begin = spans[-1].begin
            spans[-1] = TaggedSpan(text[begin : match.end()], begin, match.end(), min(spans[-1].score, score), label)
        else:
            spans.append(TaggedSpan(match.group(), match.start(), match.end(), score, label))
        previous = word
    return spans


@torch.no_grad()
def tag_words(model: EncoderModel, tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """The tag of each of a sentence's words; "O" for one that the tokenizer has no token for."""
    (found,) = label_words(model, tokenizer, [words])
    return [found[word][0] if word in found else "O" for word in range(len(words))]


def label_words(
    model: EncoderModel, tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]
) -> list[dict[int, tuple[str, float]]]:
    """For each sentence, by the number of a word: the label of its first token and its probability; words without a
    token are left out."""
    tokenized = [tokenize_tagged_words(tokenizer, words, list(range(len(words)))) for words in sentences]
    names = model.config.labels or tuple(str(i) for i in range(model.config.n_labels))
    labels: list[dict[int, tuple[str, float]]] = [{} for _ in sentences]
    for i, logits in token_logits(model, SpecialTokenTemplate(tokenizer), [ids for ids, _ in tokenized]):
        scores, best = logits.float().softmax(dim=-1).max(dim=-1)  # (T,) each
        for word, label, score in zip(tokenized[i][1], best.tolist(), scores.tolist(), strict=True):
            if word != IGNORED:
                labels[i][word] = (names[label], score)
    return labels


def token_logits(
    model: EncoderModel, template: SpecialTokenTemplate, rows: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Tensor]]:
    """The index of each row of token ids that is not empty, and its logits (T, C); rows may be of any length."""
    room = model.context_length - len(template.before) - len(template.after)
    windows: list[tuple[int, int, int]] = []  # of all rows: the row, its first token, the end
    for i, ids in enumerate(rows):
        size = min(len(ids), room)
        starts = [*range(0, len(ids) - size, (size + 1) // 2), len(ids) - size] if size else []  # overlap by a half
        windows += [(i, start, start + size) for start in starts]
    found: dict[int, Tensor] = {}
    for batch in batch_by_length([end - start for _, start, end in windows], MAX_BATCH):
        chosen = [template.wrap(rows[i][start:end]) for i, start, end in (windows[k] for k in batch)]
        lengths = lengths_if_padded(chosen)
        lengths = None if lengths is None else lengths.to(model.device)
        logits = model(Batch(pad_ids(chosen, 0).to(model.device), lengths)).logits  # (B, T, C)
        assert logits is not None, "the ability promises a head"
        found |= dict(zip(batch, logits[:, len(template.before) :], strict=True))
    for i, group in groupby(range(len(windows)), key=lambda k: windows[k][0]):
        parts = [(windows[k][1], windows[k][2], found.pop(k)) for k in group]
        whole = parts[0][2].new_empty(len(rows[i]), parts[0][2].shape[-1])
        last = 0  # the end of the window before
        for start, end, part in parts:
            begin = max(start, (start + last) // 2)  # the middle of the overlap
            whole[begin:end] = part[begin - start : end - start]
            last = end
        yield i, whole
