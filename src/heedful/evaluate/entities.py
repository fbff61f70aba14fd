"""Entity-level precision, recall and F1 as CoNLL-2003 counts them: type and both boundaries must be right.

Tags are B-PER, I-PER, O (IOB2); IOB1, where B- stands only between two adjacent entities of one type, gives the same
entities (conlleval, Tjong Kim Sang & De Meulder 2003).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
