"""Extractive question answering: the span of a passage that answers a question (BERT, section 4.2).

A long passage is read in overlapping windows; the best span of all windows is taken. That there may be no answer
(SQuAD 2) is not considered.

    T tokens of a window
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heedful.data.dataset import Draw
from heedful.data.squad import Question, SquadWindows
from heedful.models.base import Batch, TruncationWarning
from heedful.models.encoder import EncoderModel, has_segments
from heedful.text.blank import is_blank
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown
from heedful.text.warn import warn

MAX_ANSWER = 30  # tokens, as in BERT's code
MAX_WINDOW = 384  # tokens of question and passage, likewise
OVERLAP = 128  # tokens that two windows have in common, likewise


@dataclass(frozen=True)
class AnswerSpan:
    """The answer, passage[begin:end]."""

    text: str
    begin: int
    end: int
    score: float  # the probability of its beginning times that of its end, among the tokens of its window


@torch.no_grad()
def extract_answer(model: EncoderModel, tokenizer: Tokenizer, question: str, passage: str) -> AnswerSpan:
    """The likeliest span of at most MAX_ANSWER tokens."""
    asked = Question("", question, 0, (), None, None)
    longest = min(MAX_WINDOW, model.context_length)
    stride, segments = min(OVERLAP, longest // 4), has_segments(model)
    windows = SquadWindows([passage], [asked], tokenizer, max_length=longest, stride=stride, segments=segments)
    if is_blank(question) or is_blank(passage) or not len(windows.question_ids[0]) or not len(windows.ids[0]):
        raise ValueError("give a question and a passage to find its answer in: one of them is empty")
    warn_if_unknown(tokenizer, [question, passage])
    for note in windows.notes:
        warn(note, TruncationWarning)
    best, highest = AnswerSpan("", 0, 0, 0.0), -torch.inf
    before = windows.passage_offset(0)
    for i, (_, first, last) in enumerate(windows.windows.tolist()):
        batch = windows.batch([Draw(0, i)], seed=0)
        segment_ids = None if batch.segments is None else batch.segments.to(model.device)
        logits = model(Batch(batch.ids.to(model.device), segments=segment_ids)).logits
        assert logits is not None, "the ability promises a head"
        begins, ends = logits[0].float().log_softmax(dim=0).T  # (T,) each
        begins, ends = begins[before : before + last - first], ends[before : before + last - first]
        pairs = begins[:, None] + ends[None]
        allowed = torch.ones_like(pairs).triu().tril(MAX_ANSWER - 1).bool()
        pairs = pairs.masked_fill(~allowed, -torch.inf)
        score = float(pairs.max())
        if score > highest:
            begin, end = divmod(int(pairs.argmax()), len(ends))
            a, b = int(windows.begins[0][first + begin]), int(windows.ends[0][first + end])
            best, highest = AnswerSpan(passage[a:b], a, b, float(torch.tensor(score).exp())), score
    return best
