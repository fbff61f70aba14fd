"""Texts without anything to read in them."""

from __future__ import annotations

import unicodedata

INVISIBLE = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})  # Unicode's categories: controls, formats, separators


def is_blank(text: str) -> bool:
    """Whether a text is empty, or has only whitespace, control characters and invisible ones (zero-width space)."""
    return all(unicodedata.category(character) in INVISIBLE for character in text)
