"""Token classification: the entities of a text; with tags of another kind, as parts of speech, every word.

A text that is longer than the model's context is read in overlapping windows, and a token of two windows has its tag
from the one where it is farther from the edge.

    B windows, T tokens, C labels
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heedful.data.dataset import IGNORED
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.data.tagging import tokenize_tagged_words
from heedful.models.base import Batch
from heedful.models.encoder import EncoderModel
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown

WINDOWS = 8  # of a long text in one batch


@dataclass(frozen=True)
class TaggedSpan:
    """An entity or a word, text[begin:end], and its label without B- or I-."""

    text: str
    begin: int
    end: int
    score: float  # a probability; of several words, the lowest of theirs
    label: str


@torch.no_grad()
def tag_spans(model: EncoderModel, tokenizer: Tokenizer, text: str) -> list[TaggedSpan]:
    """The labelled spans of a text in order; a word has the label of its first token, "O" is left out."""
    words = list(re.finditer(r"\w+|[^\w\s]", text))
    if not words:
        return []
    warn_if_unknown(tokenizer, [text])
    spans: list[TaggedSpan] = []
    previous = -1  # the last word with a label
    for word, (name, score) in _label_words(model, tokenizer, [m.group() for m in words]).items():
        if name == "O":
            continue
        match = words[word]
        label = name.removeprefix("B-").removeprefix("I-")
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
    found = _label_words(model, tokenizer, words)
    return [found[word][0] if word in found else "O" for word in range(len(words))]


def _label_words(model: EncoderModel, tokenizer: Tokenizer, words: Sequence[str]) -> dict[int, tuple[str, float]]:
    """By the number of a word, the label of its first token and its probability; words without a token are left out."""
    ids, word_of_token = tokenize_tagged_words(tokenizer, words, list(range(len(words))))
    if not ids:
        return {}
    logits = _token_logits(model, SpecialTokenTemplate(tokenizer), ids)  # (T, C)
    scores, best = logits.float().softmax(dim=-1).max(dim=-1)  # (T,) each
    names = model.config.labels or tuple(str(i) for i in range(model.config.n_labels))
    return {
        word: (names[int(best[position])], float(scores[position]))
        for position, word in enumerate(word_of_token)
        if word != IGNORED
    }


def _token_logits(model: EncoderModel, template: SpecialTokenTemplate, ids: list[int]) -> Tensor:
    """Logits (T, C) of the tokens of a text of any length."""
    size = min(len(ids), model.context_length - len(template.before) - len(template.after))
    starts = [*range(0, len(ids) - size, (size + 1) // 2), len(ids) - size]  # windows overlap by a half
    found: list[Tensor] = []
    for i in range(0, len(starts), WINDOWS):
        rows = [template.wrap(ids[start : start + size]) for start in starts[i : i + WINDOWS]]
        logits = model(Batch(torch.from_numpy(np.stack(rows)).to(model.device))).logits  # (B, T, C)
        assert logits is not None, "the ability promises a head"
        found += logits[:, len(template.before) :]
    whole = found[0].new_empty(len(ids), found[0].shape[-1])
    for start, before, logits in zip(starts, [-size, *starts], found, strict=False):
        begin = max(start, (start + before + size) // 2)  # the middle of the overlap with the window before
        whole[begin : start + size] = logits[begin - start : size]
    return whole
