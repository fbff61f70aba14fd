"""The small models that ship with heedful. Each is a folder in the hub's layout with a card (README.md).

A card begins with the hub's metadata (YAML: license, datasets, tags, and scores as `model-index` has them, each with
the command that gives it); then come a title, a table of facts and, for models that generate, unedited samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SHARES = ("accuracy", "exact_match", "f1")  # metrics from 0 to 1, which are shown in percent


@dataclass(frozen=True)
class CardScore:
    """A score in a card: the metric's name, its value, the data, and the command that gives it."""

    type: str
    name: str
    value: float
    data: str
    command: str

    def __str__(self) -> str:
        shown = f"{100 * self.value:.3g} %" if self.type in SHARES else f"{self.value:.4g}"
        return f"{shown} {self.name}"


@dataclass(frozen=True)
class Card:
    """What a model's card says."""

    about: str
    scores: tuple[CardScore, ...]
    facts: dict[str, str]  # the rows of its table: architecture, data, kept apart, good at, fails at ...
    metadata: dict[str, Any]
    text: str  # without the metadata

    @property
    def score(self) -> str:
        """The first score, as a word for a column; empty if there is none."""
        return str(self.scores[0]) if self.scores else ""


def cards() -> dict[str, str]:
    """The models that ship: name, and the description in the title of its card."""
    return {path.parent.name: _about(split_card(path)[1]) for path in sorted(FOLDER.glob("*/README.md"))}


@cache
def read_card(path: Path) -> Card:
    """The card in a model's folder."""
    import yaml  # type: ignore[import-untyped]  # which huggingface_hub depends on

    front, text = split_card(path / "README.md")
    metadata = yaml.safe_load(front) or {}
    rows = re.findall(r"^\| (\w[\w ]*?) \| (.+) \|$", text, flags=re.MULTILINE)
    return Card(_about(text), tuple(_scores(metadata)), dict(rows), metadata, text)


def split_card(path: Path) -> tuple[str, str]:
    """The metadata of a card, which may be empty, and the rest."""
    text = path.read_text(encoding="utf-8")
    found = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    return (found[1], text[found.end() :]) if found else ("", text)


def _about(text: str) -> str:
    return text.strip().splitlines()[0].removeprefix("# ").partition(": ")[2]


def _scores(metadata: dict[str, Any]) -> list[CardScore]:
    return [
        CardScore(
            metric["type"], metric.get("name", metric["type"]), float(metric["value"]), result["dataset"]["name"],
            metric.get("args", {}).get("command", ""),
        )
        for model in metadata.get("model-index", ())
        for result in model["results"]
        for metric in result["metrics"]
    ]  # fmt: skip
