"""Exact match: how many answers are the reference, character by character, and how many of their symbols.

Of an encoder-decoder the answer is its translation, of a decoder its greedy completion up to the end of the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from heedful.data.pairs import read_pairs
from heedful.evaluate.bootstrap import Metric, mean_metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task


@dataclass(frozen=True)
class ExactMatch(Task):
    """Exact match of a model's answers."""

    about: ClassVar[str] = "answers that are exactly the reference, and the symbols (words) of them that are right"
    reads: ClassVar[str] = "two parallel files, or a .tsv, .csv or .jsonl of pairs; .gz and .xz too"
    n_files: ClassVar[tuple[int, int]] = (1, 2)

    source: str = ""  # column of a table, by default its first
    target: str = ""  # likewise, by default its second
    prefix: str = ""  # before every source
    beams: int | None = None  # of an encoder-decoder; 1: greedy; by default the model's own
    max_tokens: int = 64  # of a decoder's answer

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must generate."""
        loaded.require("generate")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """A source and its reference each."""
        pairs = read_pairs(paths[0], self.source, str(paths[1]) if len(paths) > 1 else self.target)
        return [Item(str(i), self.prefix + source, target, source) for i, (source, target) in enumerate(pairs)]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The answers; an item's score is 1 if it is right."""
        sources = [item.input for item in items]
        if "translate" in loaded.abilities:
            options: dict[str, Any] = {} if self.beams is None else {"beams": self.beams}
            answers = loaded.translate(sources, **options)
        else:
            options = {"temperature": 0, "max_tokens": self.max_tokens, "stop": "\n"}
            answers = loaded.generate(sources, **options)
        records: list[Record] = []
        for answer, item in zip(answers, items, strict=True):
            said, reference = answer.split(), str(item.reference).split()
            right = sum(a == b for a, b in zip_longest(said, reference))
            exact = float(said == reference)
            share = right / max(1, len(said), len(reference)) if said or reference else 1.0
            records.append({"prediction": answer.strip(), "score": exact, "symbols": share})
        return records

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """Exact match, and the mean share of symbols in their places, in percent."""
        return [
            mean_metric("exact match", [r["score"] for r in records]),
            mean_metric("symbols", [r["symbols"] for r in records]),
        ]
