"""Lines and rows of files with their line numbers: plain text, csv, tsv and jsonl, compressed or not.

Rows are numbered by their first line, and every error names the line. Tab-separated files have no quoting. The first
row is a header if it has one of the usual column names, or if the caller names columns.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from heedful.text.parse import parse_json

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# Usual column names; a first row with one of them is a header.
TEXT = ("text", "sentence", "tweet", "comment", "comment_text", "review", "message", "document", "content")
LABEL = ("label", "class", "category", "target", "sentiment", "is_toxic", "score", "stars", "rating")
SECOND = ("text_b", "sentence2", "text2", "second", "hypothesis")
FIRST = ("text_a", "sentence1", "text1", "first", "premise", "source")
LARGEST_FIELD = 2**27  # characters


def file_kind(path: Path) -> str:
    """The file type by its suffix, ignoring compression: "csv" for a.csv.gz."""
    inner = path.with_suffix("") if path.suffix in OPENERS else path
    return inner.suffix.removeprefix(".").lower()


def open_text(path: Path) -> IO[str]:
    """A text file opened for reading as UTF-8, decompressed by its suffix."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    opened: IO[str] = OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="\n")
    return opened


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line with its number, without its line break (LF or CRLF)."""
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                yield number, line.removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 after line {number}: save it as UTF-8") from None
        except (OSError, EOFError, lzma.LZMAError) as problem:
            raise ValueError(f"{path} is damaged after line {number}: {problem}") from None


@dataclass(frozen=True)
class TableRow:
    """One row of a table and its line number."""

    number: int  # of its first line
    cells: dict[str, Any] | list[str]

    def get(self, path: Path, column: str | int) -> Any:
        """The value of a column, by name or index; the ValueError for a missing one suggests another."""
        if isinstance(self.cells, dict) and column in self.cells:
            return self.cells[str(column)]
        if isinstance(self.cells, list) and isinstance(column, int) and column < len(self.cells):
            return self.cells[column]
        has = ", ".join(self.cells) if isinstance(self.cells, dict) else f"{len(self.cells)} columns"
        near = difflib.get_close_matches(str(column), list(self.cells), n=1)
        hint = f"did you mean {near[0]}?" if near and isinstance(self.cells, dict) else f"it has {has}"
        raise ValueError(f"{path}, line {self.number}: no column {column!r} ({hint})")


def read_rows(path: Path, *, named: bool) -> Iterator[TableRow]:
    """The rows of a csv, tsv or jsonl file; `named` means that csv and tsv have a header."""
    kind = file_kind(path)
    if kind in ("jsonl", "ndjson"):
        yield from _objects(path)
        return
    if kind not in ("csv", "tsv", "txt"):
        raise ValueError(f"{path}: a table is a .csv, .tsv or .jsonl file (or one of these as .gz, .xz, .bz2)")
    names: list[str] | None = None
    for number, cells in _tabbed(path) if kind != "csv" else _quoted(path):
        if named and names is None:
            names = cells
        elif names is None:
            yield TableRow(number, cells)
        elif len(cells) != len(names):
            raise ValueError(f"{path}, line {number}: {len(cells)} columns, and the first line names {len(names)}")
        else:
            yield TableRow(number, dict(zip(names, cells, strict=True)))


def column_names(path: Path) -> list[str] | None:
    """The column names if the first row looks like a header, or the keys of the first object of jsonl; else None."""
    if file_kind(path) in ("jsonl", "ndjson"):
        first = next(_objects(path), None)
        return None if first is None else list(first.cells)
    top = next(_tabbed(path) if file_kind(path) != "csv" else _quoted(path), (0, []))[1]
    known = {*TEXT, *LABEL, *FIRST, *SECOND}
    return top if any(cell.strip().lower() in known for cell in top) else None


def find_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column with one of the usual names."""
    return next((n for u in usual for n in names if n.strip().lower() == u), None)


def _objects(path: Path) -> Iterator[TableRow]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            found = parse_json(line)
        except json.JSONDecodeError as problem:
            raise ValueError(f"{path}, line {number}: not JSON ({problem.msg})") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: a JSON object is expected, with a name for each value")
        yield TableRow(number, found)


def _tabbed(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in numbered_lines(path):
        if line.strip():
            yield number, line.split("\t")


def _quoted(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST_FIELD))
    reader = csv.reader((line + "\n" for _, line in numbered_lines(path)), strict=True)
    begin = 1
    try:
        for cells in reader:
            if cells:
                yield begin, cells
            begin = reader.line_num + 1
    except csv.Error as problem:
        raise ValueError(f"{path}, line {begin}: {problem}") from None
