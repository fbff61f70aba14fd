"""Extractive question answering: the span of a passage that answers a question (BERT, section 4.2).

A long passage is read in overlapping windows; the best span of all windows is taken. A model that was taught so says
that there is no answer (SQuAD 2), by pointing at [CLS]: if that is likelier than the best span, by its own threshold,
in the window where it is least likely.

    B windows, T tokens of a window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heedful.data.dataset import Draw
from heedful.data.squad import Question, SquadWindows
from heedful.models.base import Batch, TruncationWarning
from heedful.models.encoder import EncoderModel, has_segments
from heedful.tasks.embed import MAX_BATCH, batch_by_length
from heedful.text.blank import is_blank
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown
from heedful.text.warn import warn

MAX_ANSWER = 30  # tokens, as in BERT's code
MAX_WINDOW = 384  # tokens of question and passage, likewise
OVERLAP = 128  # tokens that two windows have in common, likewise


@dataclass(frozen=True)
class AnswerSpan:
    """The answer, passage[begin:end]; an empty text where the model says that there is none."""

    text: str
    begin: int
    end: int
    score: float  # the probability of its beginning times that of its end, among the tokens of its window
    no_answer: float | None = None  # the probability that there is none; None: this model always answers


@torch.no_grad()
def extract_answers(
    model: EncoderModel, tokenizer: Tokenizer, questions: Sequence[str], passages: Sequence[str]
) -> list[AnswerSpan]:
    """For each question the likeliest span of its passage, of at most MAX_ANSWER tokens, or that it has none."""
    windows = _windows(model, tokenizer, questions, passages)
    found, highest = [AnswerSpan("", 0, 0, 0.0)] * len(questions), [-torch.inf] * len(questions)
    none = [torch.inf] * len(questions)  # the lowest log-probability of [CLS] over the windows
    for indices in batch_by_length(windows.lengths.tolist(), MAX_BATCH):
        batch = windows.batch([Draw(0, i) for i in indices], seed=0)
        segments, lengths = (None if x is None else x.to(model.device) for x in (batch.segments, batch.lengths))
        logits = model(Batch(batch.ids.to(model.device), lengths, segments=segments)).logits  # (B, T, 2)
        assert logits is not None, "the ability promises a head"
        for i, row in zip(indices, logits.float(), strict=True):
            number, first, last = windows.windows[i].tolist()
            begins, ends = row[: windows.lengths[i]].log_softmax(dim=0).T  # (T,) each
            none[number] = min(none[number], float(begins[0] + ends[0]))
            before = windows.passage_offset(number)
            begin, end, score = best_span(begins[before : before + last - first], ends[before : before + last - first])
            if score > highest[number]:
                a, b = int(windows.begins[number][first + begin]), int(windows.ends[number][first + end])
                found[number], highest[number] = AnswerSpan(passages[number][a:b], a, b, math.exp(score)), score
    threshold = model.config.null_threshold
    if threshold is None:
        return found
    return [_or_none(*parts, threshold) for parts in zip(found, highest, none, strict=True)]


def _or_none(span: AnswerSpan, score: float, none: float, threshold: float) -> AnswerSpan:
    """The span, or an empty one if "no answer" is likelier by more than the threshold (log-probabilities)."""
    kept = AnswerSpan("", 0, 0, span.score) if none - score > threshold else span
    return replace(kept, no_answer=math.exp(none))


def best_span(begins: Tensor, ends: Tensor) -> tuple[int, int, float]:
    """The first and last token of the likeliest span, and its log-probability, from those (T,) of begins and ends."""
    pairs = begins[:, None] + ends[None]
    allowed = torch.ones_like(pairs).triu().tril(MAX_ANSWER - 1).bool()
    pairs = pairs.masked_fill(~allowed, -torch.inf)
    begin, end = divmod(int(pairs.argmax()), len(ends))
    return begin, end, float(pairs[begin, end])


def _windows(
    model: EncoderModel, tokenizer: Tokenizer, questions: Sequence[str], passages: Sequence[str]
) -> SquadWindows:
    if len(questions) != len(passages):
        raise ValueError(f"{len(questions)} questions and {len(passages)} passages: give each question its passage")
    asked = [Question("", text, i, (), None, None) for i, text in enumerate(questions)]
    longest = min(MAX_WINDOW, model.context_length)
    stride, segments = min(OVERLAP, longest // 4), has_segments(model)
    windows = SquadWindows(passages, asked, tokenizer, max_length=longest, stride=stride, segments=segments)
    n_tokens = [*windows.question_ids.lengths, *windows.ids.lengths]
    if any(map(is_blank, [*questions, *passages])) or not all(n_tokens):
        raise ValueError("give a question and a passage to find its answer in: one of them is empty")
    warn_if_unknown(tokenizer, [*questions, *passages])
    for note in windows.notes:
        warn(note, TruncationWarning)
    return windows
