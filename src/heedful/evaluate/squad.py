"""Extractive question answering: exact match and F1 over words, as SQuAD's script for v1.1 counts them (Rajpurkar et
al. 2016, section 6.1): in lower case, without punctuation and articles, the best over a question's reference answers.

A question without an answer (SQuAD 2) is right if the prediction is empty; where the data has such, the others are
told apart.
"""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from heedful.data.squad import read_squad
from heedful.evaluate.bootstrap import Metric, mean_metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task


@dataclass(frozen=True)
class Squad(Task):
    """Exact match and F1 of the answers that a model finds in passages."""

    about: ClassVar[str] = "exact match and F1 of answers found in passages, as SQuAD's own script"
    reads: ClassVar[str] = "SQuAD's JSON, version 1 or 2, or a list of {context, qas}"
    batch_size: ClassVar[int] = 16

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must answer questions."""
        loaded.require("answer")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """A question with its passage, and the reference answers."""
        passages, questions, notes = read_squad(paths[0])
        for note in notes:
            warnings.warn(f"{paths[0]}: {note}", stacklevel=2)
        return [Item(q.id, (q.text, passages[q.passage]), list(q.answers), q.text) for q in questions]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The answers; an item's score is its F1."""
        records: list[Record] = []
        for item in items:
            said = loaded.answer(*item.input).text
            exact = max(exact_match(said, answer) for answer in item.reference or [""])
            f1 = max(answer_f1(said, answer) for answer in item.reference) if item.reference else exact
            records.append({"prediction": said, "score": f1, "exact": exact, "answerable": bool(item.reference)})
        return records

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """Exact match and F1, in percent; of questions with an answer and of those without, where there are both."""
        found = [
            mean_metric("exact match", [r["exact"] for r in records]),
            mean_metric("F1", [r["score"] for r in records]),
        ]
        answerable = np.array([r.get("answerable", True) for r in records], dtype=float)
        if 0 < answerable.sum() < len(records):
            found += [
                _metric_of("F1, has answer", [r["score"] for r in records], answerable),
                _metric_of("right, no answer", [r["exact"] for r in records], 1 - answerable),
            ]
        return found


def _metric_of(name: str, scores: Sequence[float], chosen: np.ndarray) -> Metric:
    """The mean of the scores of chosen items, in percent; `chosen` is 1 or 0 for each."""
    kept = np.asarray(scores, dtype=float) * chosen
    return Metric(name, lambda counts: 100 * (counts @ kept) / np.maximum(counts @ chosen, 1))


def normalize_answer(text: str) -> str:
    """An answer as SQuAD's script compares it: lower case, without punctuation, articles and more than one space."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 if both are the same after normalization, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


def answer_f1(prediction: str, reference: str) -> float:
    """The harmonic mean of precision and recall over the words; 0 where they have none in common."""
    said, right = normalize_answer(prediction).split(), normalize_answer(reference).split()
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / max(len(said) + len(right), 1)
