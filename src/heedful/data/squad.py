"""Extractive question answering data (SQuAD, Rajpurkar et al. 2016; BERT, section 4.2).

    [CLS] question [SEP] a window of the passage [SEP]      targets: the first and the last token of the answer

A passage that is too long is split into windows that overlap by `stride` tokens; if the answer is not entirely inside a
window, both targets are [CLS], as for a question without an answer (SQuAD 2).

    B windows, T tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful.data import tables
from heedful.data.dataset import Draw
from heedful.data.ragged import RaggedArray, content_digest, lengths_if_padded, pad_ids
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.models.base import Batch
from heedful.text import Tokenizer
from heedful.text.parse import parse_json

LONGEST_QUESTION = 64  # tokens, as in BERT's code; longer ones are truncated


@dataclass(frozen=True)
class Question:
    """A question about a passage; `begin` and `end` are the answer's span in characters, None without an answer."""

    id: str
    text: str
    passage: int
    answers: tuple[str, ...]  # all reference answers, for evaluation
    begin: int | None
    end: int | None


class SquadWindows:
    """Windows of passages with a question each; `windows` has the question and the token span of each."""

    def __init__(
        self,
        passages: Sequence[str],
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        *,
        max_length: int = 384,
        stride: int = 128,
        segments: bool = True,
    ) -> None:
        if not questions:
            raise ValueError("there is no question")
        self.passages, self.questions = list(passages), list(questions)
        self.notes: list[str] = []
        self.template, self.has_segments = SpecialTokenTemplate(tokenizer), segments
        encoded = [tokenizer.encode_with_offsets(passage) for passage in passages]
        self.ids = RaggedArray([index for index, _, _ in rows] for rows in encoded)
        self.begins = RaggedArray([begin for _, begin, _ in rows] for rows in encoded)
        self.ends = RaggedArray([end for _, _, end in rows] for rows in encoded)
        question_ids = tokenizer.encode_batch([q.text for q in questions])
        self.question_ids = RaggedArray(ids[:LONGEST_QUESTION] for ids in question_ids)
        n_long = sum(len(ids) > LONGEST_QUESTION for ids in question_ids)
        if n_long:
            which = f"{n_long} of {len(questions)} questions"
            self.notes.append(f"{which} are longer than {LONGEST_QUESTION} tokens: their ends are cut")
        self.windows = self._cut(max_length, stride)  # (B, 3): question, first token, last token + 1
        self.targets = np.array([self._find(*w) for w in self.windows.tolist()], dtype=np.int64)

    @classmethod
    def read(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        *,
        max_length: int = 384,
        stride: int = 128,
        segments: bool = True,
    ) -> SquadWindows:
        """Read SQuAD's JSON, version 1 or 2, or a list of {context, qas: [{question, answer}]} without positions."""
        passages, questions, notes = read_squad(Path(path))
        found = cls(passages, questions, tokenizer, max_length=max_length, stride=stride, segments=segments)
        found.notes = notes + found.notes
        return found

    def _cut(self, max_length: int, stride: int) -> np.ndarray:
        """The windows of every question, with an overlap of `stride` tokens."""
        windows = []
        for number, question in enumerate(self.questions):
            n = int(self.ids.lengths[question.passage])
            room = max_length - self.template.n_pair - int(self.question_ids.lengths[number])
            if room < 1 or (n > room and room <= stride):
                raise ValueError(
                    f"{max_length} tokens are too few for the question {question.text[:50]!r} and a window of its "
                    f"passage that moves on by more than 0 with a stride of {stride}: set data.length higher"
                )
            begin = 0
            while begin + room < n:
                windows.append((number, begin, begin + room))
                begin += room - stride
            windows.append((number, begin, n))
        return np.array(windows, dtype=np.int64)

    def _find(self, number: int, begin: int, end: int) -> tuple[int, int]:
        """Positions of the answer's first and last token in a window, or (0, 0), [CLS], if it is not inside."""
        question = self.questions[number]
        if question.begin is None or question.end is None:
            return 0, 0
        begins, ends = self.begins[question.passage], self.ends[question.passage]
        first = int(
            np.searchsorted(ends, question.begin, side="right")
        )  # first token that ends after the answer begins
        last = int(np.searchsorted(begins, question.end, side="left")) - 1  # last token that begins before it ends
        if not begin <= first <= last < end:
            return 0, 0
        shift = self.passage_offset(number) - begin
        return first + shift, last + shift

    def passage_offset(self, number: int) -> int:
        """Number of tokens before the passage in a window: special tokens and the question."""
        return len(self.template.pair_before) + int(self.question_ids.lengths[number]) + len(self.template.between)

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("answers", self.ids, self.question_ids, self.windows, self.targets)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The length of each example in tokens, for batches of similar lengths."""
        sizes = self.windows[:, 2] - self.windows[:, 1]
        return np.asarray(sizes + self.question_ids.lengths[self.windows[:, 0]] + self.template.n_pair)

    @property
    def groups(self) -> np.ndarray:
        """The passage of each window, so that a train/validation split keeps passages whole."""
        return np.array([self.questions[number].passage for number in self.windows[:, 0]])

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        rows, segments = [], []
        for draw in draws:
            number, begin, end = self.windows[draw.index]
            passage = self.ids[self.questions[number].passage]
            ids, sides = self.template.wrap_pair(self.question_ids[number], passage[begin:end])
            rows.append(ids)
            segments.append(sides)
        return Batch(
            pad_ids(rows, 0),
            lengths_if_padded(rows),
            segments=pad_ids(segments, 0) if self.has_segments and self.template.has_segments else None,
            targets=torch.from_numpy(self.targets[[d.index for d in draws]]),
        )

    def text(self, index: int, first: int, last: int) -> str:
        """The passage text of tokens `first` to `last` of a window; empty if they are not in the passage."""
        number, begin, end = (int(x) for x in self.windows[index])
        shift = begin - self.passage_offset(number)
        if not begin <= first + shift <= last + shift < end:
            return ""
        passage = self.questions[number].passage
        a, b = self.begins[passage][first + shift], self.ends[passage][last + shift]
        return self.passages[passage][a:b].strip()


def read_squad(path: Path) -> tuple[list[str], list[Question], list[str]]:
    """Passages, questions and notes. An answer without a position is located at its first occurrence."""
    with tables.open_text(path) as file:
        try:
            found = parse_json(file.read())
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{path} is not JSON: {problem}") from None
    passages: list[str] = []
    questions: list[Question] = []
    n_missing = 0
    for paragraph in _paragraphs(path, found):
        passage = _text(path, paragraph, "context")
        passages.append(passage)
        for qa in paragraph.get("qas", []):
            text = _text(path, qa, "question")
            answers = [a for a in qa.get("answers", []) if isinstance(a, dict)]
            if "answer" in qa:
                answers.append({"text": qa["answer"]})
            places = [_place(path, passage, text, a) for a in answers]
            if answers and places[0] is None:
                n_missing += 1
                continue
            place = places[0] if places else None
            begin, end = place if place is not None else (None, None)
            right = tuple(dict.fromkeys(_text(path, a, "text") for a in answers))
            name = str(qa.get("id", len(questions)))
            questions.append(Question(name, text, len(passages) - 1, right, begin, end))
    notes = [f"{n_missing} answers do not stand in their passages: these questions are left out"] if n_missing else []
    return passages, questions, notes


def _paragraphs(path: Path, found: Any) -> Iterator[dict[str, Any]]:
    articles = found.get("data") if isinstance(found, dict) else found
    if not isinstance(articles, list) or not all(isinstance(a, dict) for a in articles):
        raise ValueError(f'{path} is not in the form of SQuAD: {{"data": [{{"paragraphs": [...]}}]}}')
    for article in articles:
        paragraphs = article.get("paragraphs", [article])
        for paragraph in paragraphs:
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas", []), list):
                raise ValueError(f"{path}: a paragraph is no object with a context and its questions (qas)")
            yield paragraph


def _text(path: Path, found: Any, name: str) -> str:
    text = found.get(name) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{path}: {str(found)[:80]!r} has no {name}, or it is no text")
    return text


def _place(path: Path, passage: str, question: str, answer: dict[str, Any]) -> tuple[int, int] | None:
    """The answer's span in the passage, in characters; None if it does not occur."""
    text = _text(path, answer, "text")
    begin = answer.get("answer_start")
    if begin is None:
        begin = passage.find(text)
    elif not isinstance(begin, int) or passage[begin : begin + len(text)] != text:
        raise ValueError(
            f"{path}: the answer {text[:50]!r} to {question[:50]!r} does not stand at character {begin} of its passage"
        )
    return (begin, begin + len(text)) if begin >= 0 and text else None
