"""Entity-level precision, recall and F1 as CoNLL-2003 counts them: type and both boundaries must be right.

Tags are B-PER, I-PER, O (IOB2); IOB1, where B- stands only between two adjacent entities of one type, gives the same
entities (conlleval, Tjong Kim Sang & De Meulder 2003).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from heedful.data.tagging import read_tagged
from heedful.evaluate.bootstrap import Metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task
from heedful.models.encoder import EncoderModel
from heedful.tasks.tag import tag_words

Entity = tuple[str, int, int]  # type, first word, word after the last


@dataclass(frozen=True)
class EntityScore:
    """Counts of true, predicted and correctly predicted entities."""

    n_true: int
    n_found: int
    n_right: int

    @property
    def precision(self) -> float:
        """The share of predicted entities that are right."""
        return self.n_right / max(self.n_found, 1)

    @property
    def recall(self) -> float:
        """The share of true entities that were predicted."""
        return self.n_right / max(self.n_true, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 where nothing is right."""
        return 2 * self.n_right / max(self.n_true + self.n_found, 1)


def are_entity_tags(tags: Iterable[str]) -> bool:
    """Whether all tags are O, B-... or I-..., and not, for example, parts of speech."""
    found = set(tags)
    return found != {"O"} and all(tag == "O" or tag.startswith(("B-", "I-")) for tag in found)


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of one sentence's tags."""
    found: set[Entity] = set()
    kind, begin = "", 0
    for place, tag in enumerate([*tags, "O"]):
        if kind and not (tag.startswith("I-") and tag[2:] == kind):
            found.add((kind, begin, place))
            kind = ""
        if not kind and tag != "O":
            kind, begin = tag[2:], place
    return found


def score_entities(true: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> EntityScore:
    """The score of predicted tags against the true ones, sentence by sentence."""
    n_true = n_found = n_right = 0
    for expected, found in zip(true, predicted, strict=True):
        if len(expected) != len(found):
            raise ValueError(f"{len(expected)} words have {len(found)} tags")
        a, b = entities(expected), entities(found)
        n_true, n_found, n_right = n_true + len(a), n_found + len(b), n_right + len(a & b)
    return EntityScore(n_true, n_found, n_right)


@dataclass(frozen=True)
class Entities(Task):
    """Precision, recall and F1 of the entities that a model finds, of all types and of each."""

    about: ClassVar[str] = "precision, recall and F1 of named entities, of each type too, as conlleval"
    reads: ClassVar[str] = "tagged sentences, CoNLL's columns: a word and last its tag in each line; .gz too"

    column: int = -1  # of the tag, from 0; -1 is the last
    types: str = ""  # score these types alone, as PER,LOC; those that a model does not know count as missed

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must tag."""
        loaded.require("tag")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """The words of a sentence and their tags."""
        sentences = read_tagged(paths[0], self.column)
        if sentences and not are_entity_tags(tag for _, tags in sentences for tag in tags):
            raise ValueError(f"{paths[0]}: the tags in column {self.column} are no entities (B-PER, I-PER, O)")
        return [Item(str(i), words, " ".join(tags), " ".join(words)) for i, (words, tags) in enumerate(sentences)]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """A tag for each word; an item's score is its F1, 1 where there is nothing to find and nothing found."""
        assert loaded.tokenizer is not None, "the ability promises one"
        records: list[Record] = []
        for item in items:
            said = tag_words(cast(EncoderModel, loaded.model), loaded.tokenizer, item.input)
            counts = self._counts(item.reference.split(), said)
            n_right, n_either = sum(c[2] for c in counts.values()), sum(c[0] + c[1] for c in counts.values())
            score = 2 * n_right / n_either if n_either else 1.0
            records.append({"prediction": " ".join(said), "score": score, "entities": counts})
        return records

    def _counts(self, true: Sequence[str], said: Sequence[str]) -> dict[str, list[int]]:
        """By type, the numbers of true, found and right entities."""
        kept = set(self.types.split(",")) if self.types else None
        sets = [entities(true), entities(said), entities(true) & entities(said)]
        found = [Counter(kind for kind, _, _ in one if kept is None or kind in kept) for one in sets]
        return {kind: [count[kind] for count in found] for kind in sorted(found[0] | found[1])}

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """F1, precision and recall of all entities, then F1 of each type."""
        kinds = sorted({kind for record in records for kind in record["entities"]})
        by_type = np.array([[r["entities"].get(kind, [0, 0, 0]) for kind in kinds] for r in records], dtype=float)
        total = by_type.sum(axis=1) if kinds else np.zeros((len(records), 3))  # (N, 3)
        return [
            Metric("F1", lambda counts: 100 * f1_of(counts @ total)),
            Metric("precision", lambda counts: _share(counts @ total, 1)),
            Metric("recall", lambda counts: _share(counts @ total, 0)),
            *(
                Metric(f"F1 {kind}", lambda counts, own=by_type[:, i]: 100 * f1_of(counts @ own))  # type: ignore[misc]
                for i, kind in enumerate(kinds)
            ),
        ]

    def details(self, records: Sequence[Record]) -> dict[str, Any]:
        """The accuracy of words, and the numbers of true, found and right entities by type."""
        right = [a == b for r in records for a, b in zip(r["reference"].split(), r["prediction"].split(), strict=True)]
        counts: dict[str, list[int]] = {}
        for record in records:
            for kind, found in record["entities"].items():
                counts[kind] = [a + b for a, b in zip(counts.get(kind, [0, 0, 0]), found, strict=True)]
        return {"word accuracy": 100 * sum(right) / max(len(right), 1), "true, found, right": counts}


def f1_of(sums: np.ndarray) -> np.ndarray:
    """F1 (R,) of the numbers of true, found and right (R, 3); 0 where there are none."""
    return 2 * sums[:, 2] / np.maximum(sums[:, 0] + sums[:, 1], 1)


def _share(sums: np.ndarray, of: int) -> np.ndarray:
    return 100 * sums[:, 2] / np.maximum(sums[:, of], 1)
