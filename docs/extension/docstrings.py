"""Docstrings as reStructuredText: an indented block is shown as it stands, and nothing but `code` is marked up."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx


def as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    result: list[str] = []
    for indented, some in groupby(joined(lines), key=lambda line: line.startswith("    ")):
        block = list(some)
        result += ["::", "", *block, ""] if indented else [*escaped("\n".join(block)).splitlines(), ""]
    lines[:] = result


def joined(lines: list[str]) -> list[str]:
    """The lines; an empty one between two indented ones belongs to their block."""
    around = zip(["", *lines[:-1]], lines, [*lines[1:], ""], strict=True)
    return ["    " if not b.strip() and a.startswith("    ") and c.startswith("    ") else b for a, b, c in around]


def escaped(text: str) -> str:
    """Code as literals; what else reStructuredText would read as markup, escaped."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        rf"\ ``{part}``\ " if i % 2 else re.sub(r"([*|\\`]|_(?=\W|$))", r"\\\1", part) for i, part in enumerate(parts)
    )


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", as_rst)
