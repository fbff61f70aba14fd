"""Token classification: the entities of a text; with tags of another kind, as parts of speech, every word."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from heedful.data.dataset import IGNORED
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.data.tagging import tokenize_tagged_words
from heedful.models.base import Batch
from heedful.models.encoder import EncoderModel
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
def tag_spans(model: EncoderModel, tokenizer: Tokenizer, text: str) -> list[TaggedSpan]:
    """The labelled spans of a text in order; a word has the label of its first token, "O" is left out."""
    words = list(re.finditer(r"\w+|[^\w\s]", text))
    if not words:
        return []
    warn_if_unknown(tokenizer, [text])
    ids, word_of_token = tokenize_tagged_words(tokenizer, [m.group() for m in words], list(range(len(words))))
    frame = SpecialTokenTemplate(tokenizer)
    row = frame.wrap(ids).tolist()
    model.check_length(len(row))
    logits = model(Batch(torch.tensor([row], device=model.device))).logits
    assert logits is not None, "the ability promises a head"
    scores, best = logits[0].float().softmax(dim=-1).max(dim=-1)  # (T,) each
    names = model.config.labels or tuple(str(i) for i in range(model.config.n_labels))
    spans: list[TaggedSpan] = []
    previous = -1  # the last word with a label
    for position, word in enumerate(word_of_token, start=len(frame.before)):
        if word == IGNORED or names[int(best[position])] == "O":
            continue
        name, score, match = names[int(best[position])], float(scores[position]), words[word]
        label = name.removeprefix("B-").removeprefix("I-")
        if name.startswith("I-") and spans and spans[-1].label == label and previous == word - 1:
            begin = spans[-1].begin
            spans[-1] = TaggedSpan(text[begin : match.end()], begin, match.end(), min(spans[-1].score, score), label)
        else:
            spans.append(TaggedSpan(match.group(), match.start(), match.end(), score, label))
        previous = word
    return spans
