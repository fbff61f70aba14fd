"""Code and commands in the Markdown documents, for the tests that run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    """The text of a document, by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str = "") -> list[str]:
    """The fenced code blocks of a document that are marked with a language ("": with none)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)
    return [code for marked, code in found if marked == language]


def commands(code: str) -> list[list[str]]:
    """The command lines of a shell block as lists of arguments, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]
