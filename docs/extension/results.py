"""RESULTS.md as tables, by the heading that they stand under."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "RESULTS.md"
Table = list[list[str]]  # the head, then the rows


@cache
def sections() -> dict[str, str]:
    """The text under each heading."""
    parts = re.split(r"^##+ (.+)$", RESULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables_of(heading: str) -> list[Table]:
    """The tables under a heading, in their order."""
    found = re.findall(r"(?:^\|.*\|[ \t]*\n?)+", sections()[heading], re.MULTILINE)
    return [[cells(line) for line in text.splitlines() if not re.fullmatch(r"[|\s:-]+", line)] for text in found]


def cells(line: str) -> list[str]:
    return [part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
