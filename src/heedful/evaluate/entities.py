"""Named entities as CoNLL-2003 counts them: an entity is found if its kind and both its ends are right.

Tags are B-PER, I-PER, O; of files in the older style, where B- stands only between two entities of a kind, the same is
read (conlleval, Tjong Kim Sang & De Meulder 2003).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Entity = tuple[str, int, int]  # its kind, its first word, and the word after its last


@dataclass(frozen=True)
class EntityScore:
    """How many entities there are, how many were found, and how many of these are right."""

    n_true: int
    n_found: int
    n_right: int

    @property
    def precision(self) -> float:
        return self.n_right / max(self.n_found, 1)

    @property
    def recall(self) -> float:
        return self.n_right / max(self.n_true, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of both; 0 where nothing is right."""
        return 2 * self.n_right / max(self.n_true + self.n_found, 1)


def are_entities(tags: Iterable[str]) -> bool:
    """Whether these are tags of entities, not for example parts of speech."""
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


def score_entities(true: Iterable[Sequence[str]], said: Iterable[Sequence[str]]) -> EntityScore:
    """The score of what was said of several sentences."""
    n_true = n_found = n_right = 0
    for told, guessed in zip(true, said, strict=True):
        if len(told) != len(guessed):
            raise ValueError(f"{len(told)} words have {len(guessed)} tags")
        a, b = entities(told), entities(guessed)
        n_true, n_found, n_right = n_true + len(a), n_found + len(b), n_right + len(a & b)
    return EntityScore(n_true, n_found, n_right)
