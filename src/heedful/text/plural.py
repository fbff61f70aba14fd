"""Counts with their nouns: "1 size", "13 sizes"."""

from __future__ import annotations


def counted(n: int, noun: str, plural: str = "") -> str:
    """A number with a noun that agrees with it; `plural` is the noun's plural where an "s" does not make it."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
