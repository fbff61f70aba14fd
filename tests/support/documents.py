"""The Markdown documents, and the code and commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {"lessons", "project", "reference", "_build"}  # folders of docs/ that are not in git


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str  # "" where none is named
    code: str
    line: int


def documents() -> list[str]:
    """The README and the pages of the documentation, by their paths from the root of the repository."""
    found = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", *(path.as_posix() for path in found if path.parts[1] not in GENERATED)]


def read(name: str) -> str:
    """The text of a document, by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def fenced(name: str) -> list[Block]:
    """Every fenced code block of a document, in its order."""
    text = read(name)
    found = re.finditer(r"^```([^\s`]*)[^\n`]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(one[1], one[2], text.count("\n", 0, one.start()) + 1) for one in found]


def blocks(name: str, language: str) -> list[str]:
    """The code of a document's blocks in a language."""
    return [block.code for block in fenced(name) if block.language == language]


def commands(code: str) -> list[list[str]]:
    """The command lines of a shell block as lists of arguments, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]
