"""Similarity of words or sentences: Spearman's rank correlation between people's scores and the cosine of embeddings
(WordSim-353, MEN, SimLex-999, STS).

    N pairs, R resamples
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F

from heedful.data import tables
from heedful.evaluate.bootstrap import Metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task

SCORES = ("score", "similarity", "simlex999", "rating", "label", "mean", "human (mean)", "gold")


@dataclass(frozen=True)
class Similarity(Task):
    """Spearman's correlation of cosines with people's scores."""

    about: ClassVar[str] = "Spearman's correlation of embeddings' cosines with people's scores"
    reads: ClassVar[str] = (
        "a .tsv, .csv or .jsonl of two words or sentences and a score: the first three columns, or by name"
    )
    batch_size: ClassVar[int] = 128

    first: str | int = 0  # column of the first text, by name or from 0
    second: str | int = 1
    score: str | int | None = None  # by default a column of a usual name, else the third
    pool: str | None = None  # mean, first or last; by default the model's own

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must embed."""
        loaded.require("embed")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """Pairs of texts with their score."""
        rows = self._rows(paths[0])
        return [Item(str(i), (a, b), score, f"{a}\t{b}") for i, (a, b, score) in enumerate(rows)]

    def _rows(self, path: Path) -> list[tuple[str, str, float]]:
        """The table's rows; a first row whose score is no number has the names of the columns."""
        table = list(tables.read_rows(path, named=False))
        if not table:
            raise ValueError(f"{path} is empty")
        top = table[0].cells if isinstance(table[0].cells, dict) else _split(table[0].cells)
        names = list(top)
        header = not isinstance(top, dict) and not any(_is_number(cell) for cell in top)
        usual = tables.find_column(names, SCORES) if header or isinstance(top, dict) else None
        score: str | int = self.score if self.score is not None else usual if usual is not None else 2
        columns = [names.index(c) if isinstance(c, str) and c in names else c for c in (self.first, self.second, score)]
        found = []
        for row in table[1:] if header else table:
            cells = list(row.cells.values()) if isinstance(row.cells, dict) else _split(row.cells)
            chosen = [cells[c] if isinstance(c, int) and c < len(cells) else None for c in columns]
            if not all(isinstance(text, str) and text.strip() for text in chosen[:2]) or not _is_number(chosen[2]):
                raise ValueError(f"{path}, line {row.number}: two texts and a number are expected, not {chosen}")
            found.append((str(chosen[0]), str(chosen[1]), float(str(chosen[2]))))
        return found

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The cosine of each pair."""
        texts = [text for item in items for text in item.input]
        vectors = F.normalize(loaded.embed(texts, pool=self.pool).float(), dim=-1)
        cosines = (vectors[::2] * vectors[1::2]).sum(dim=-1).tolist()
        return [{"prediction": cosine, "score": cosine} for cosine in cosines]

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """Spearman's correlation, times 100 as it is reported."""
        said, right = ([r[key] for r in records] for key in ("prediction", "reference"))
        return [Metric("Spearman", spearman(said, right), unit="x 100")]


def spearman(first: Sequence[float], other: Sequence[float]) -> Any:
    """Spearman's rank correlation, times 100, as a function of counts (R, N); ties have their mean rank."""
    groups = [np.unique(np.asarray(values, dtype=float), return_inverse=True)[1] for values in (first, other)]
    orders = [np.argsort(group, kind="stable") for group in groups]
    begins = [
        np.searchsorted(group[order], np.arange(group.max() + 1)) for group, order in zip(groups, orders, strict=True)
    ]

    def values(counts: np.ndarray) -> np.ndarray:
        total = counts.sum(axis=1, keepdims=True)
        ranks = []
        for group, order, begin in zip(groups, orders, begins, strict=True):
            sizes = np.add.reduceat(counts[:, order], begin, axis=1)  # how many have each value, in order
            centred = np.cumsum(sizes, axis=1) - sizes / 2 - total / 2
            ranks.append(centred[:, group])
        (a, b), n = ranks, counts
        spread = np.sqrt((n * a * a).sum(axis=1) * (n * b * b).sum(axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            return 100 * (n * a * b).sum(axis=1) / spread

    return values


def _split(cells: list[str]) -> list[str]:
    """The cells of a row; lists of words are also written with spaces instead of tabs (MEN)."""
    return cells[0].split() if len(cells) == 1 else cells


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
