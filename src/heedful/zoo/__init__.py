"""The small models that ship with heedful. Each is a folder in the hub's layout with a card (README.md)."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def cards() -> dict[str, str]:
    """The models that ship: name, and the description in the first line of its card."""
    found = {}
    for card in sorted(FOLDER.glob("*/README.md")):
        first = card.read_text(encoding="utf-8").strip().splitlines()[0]
        found[card.parent.name] = first.removeprefix("# ").partition(": ")[2]
    return found
