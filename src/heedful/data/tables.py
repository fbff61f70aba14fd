"""Lines and rows of files with their line numbers: plain text, csv, tsv, jsonl and json, compressed or not.

Rows are numbered by their first line, and every error names the line. Tab-separated files have no quoting; a .csv may
have semicolons or tabs instead of commas, and a .json is a list of objects. The first row is a header if it has one of
the usual column names, or if the caller names columns. Text is decoded as in sources.py: bytes that are not UTF-8 are
Windows-1252.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from heedful.data.sources import NOT_UTF8, WINDOWS, find_encoding
from heedful.text.parse import parse_json

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# Usual column names; a first row with one of them is a header.
TEXT = ("text", "sentence", "tweet", "comment", "comment_text", "review", "message", "document", "content")
LABEL = ("label", "class", "category", "target", "sentiment", "is_toxic", "score", "stars", "rating")
SECOND = ("text_b", "sentence2", "text2", "second", "hypothesis")
FIRST = ("text_a", "sentence1", "text1", "first", "premise", "source")
PAIRS = (  # a text and what is written for it
    ("source", "target"), ("src", "tgt"), ("src", "trg"), ("question", "answer"), ("query", "answer"),
    ("input", "output"), ("input", "target"), ("text", "summary"), ("article", "summary"), ("article", "highlights"),
)  # fmt: skip
LANGUAGES = frozenset(  # ISO 639 codes and names
    "ar bg bn ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn ko ky la lt lv "
    "mk ml mn mr ms my ne nl nn no pa pl pt ro ru si sk sl so sq sr sv sw ta te th tl tr uk ur uz vi xh yi zh zu "
    "ara ces deu ell eng epo fin fra hun ind ita jpn kor lat nld pol por rus spa swe tur ukr vie zho "
    "arabic chinese czech danish dutch english finnish french german greek hindi hungarian italian japanese korean "
    "latin norwegian polish portuguese russian spanish swedish turkish ukrainian".split()
)
TABLES = ("csv", "tsv", "jsonl", "ndjson", "json")
LARGEST_FIELD = 2**27  # characters


def file_kind(path: Path) -> str:
    """The file type by its suffix, ignoring compression: "csv" for a.csv.gz."""
    inner = path.with_suffix("") if path.suffix in OPENERS else path
    return inner.suffix.removeprefix(".").lower()


def open_text(path: Path) -> IO[str]:
    """A text file opened for reading, decompressed by its suffix; bytes that are not UTF-8 become surrogates."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    opener = OPENERS.get(path.suffix, open)
    with opener(path, "rb") as file:
        encoding = find_encoding(file.read(4))
    if encoding == "utf-8":
        encoding = "utf-8-sig"
    elif encoding.startswith("utf-16"):
        encoding = "utf-16"  # reads the mark
    elif encoding.startswith("utf-32"):
        encoding = "utf-32"
    errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
    opened: IO[str] = opener(path, "rt", encoding=encoding, errors=errors, newline="\n")
    return opened


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line with its number, without its line break (LF or CRLF)."""
    number = 0
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.isascii() and NOT_UTF8.search(line):
                    line = line.translate(WINDOWS)
                yield number, line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path}, after line {number}: {problem.reason}: save it as UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as problem:
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
    """The rows of a csv, tsv, jsonl or json file; `named` means that csv and tsv have a header. Other files are read as
    tsv where their lines have a tab."""
    kind = file_kind(path)
    if kind in ("jsonl", "ndjson", "json"):
        yield from _objects(path)
        return
    if kind not in TABLES and not is_tabbed(path):
        raise ValueError(f"{path}: a table is a .csv, .tsv, .jsonl or .json file (or one of these as .gz, .xz, .bz2)")
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
    if file_kind(path) in ("jsonl", "ndjson", "json"):
        first = next(_objects(path), None)
        return None if first is None else list(first.cells)
    top = next(_tabbed(path) if file_kind(path) != "csv" else _quoted(path), (0, []))[1]
    known = {*TEXT, *LABEL, *FIRST, *SECOND}
    usual = any(cell.strip().lower() in known for cell in top)
    return top if usual or find_pair(top) is not None else None


def find_pair(names: Sequence[str]) -> tuple[str, str] | None:
    """Two columns with usual names of a text and its answer or translation."""
    by_name = {name.strip().lower(): name for name in names if isinstance(name, str)}
    for source, target in PAIRS:
        if source in by_name and target in by_name:
            return by_name[source], by_name[target]
    languages = [name for lower, name in by_name.items() if lower in LANGUAGES]
    return (languages[0], languages[1]) if len(names) == len(languages) == 2 else None


def is_tabbed(path: Path, n: int = 50) -> bool:
    """Whether a text file is a table: each of its first lines has as many tabs, at least one."""
    counts = {line.count("\t") for _, line in islice(_filled_lines(path), n)}
    return len(counts) == 1 and counts != {0}


def find_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column with one of the usual names."""
    return next((n for u in usual for n in names if n.strip().lower() == u), None)


def _objects(path: Path) -> Iterator[TableRow]:
    for number, found in _json_list(path) if file_kind(path) == "json" else _json_lines(path):
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: a JSON object is expected, with a name for each value")
        yield TableRow(number, found)


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _filled_lines(path):
        try:
            yield number, parse_json(line)
        except json.JSONDecodeError as problem:
            raise ValueError(f"{path}, line {number}: not JSON ({problem.msg})") from None


def _json_list(path: Path) -> Iterator[tuple[int, Any]]:
    """The entries of a file that is one list, numbered from 1; of several objects, they are read line by line."""
    text = "\n".join(line for _, line in numbered_lines(path))
    try:
        found = parse_json(text)
    except json.JSONDecodeError as problem:
        if problem.msg != "Extra data":
            raise ValueError(f"{path}, line {problem.lineno}: not JSON ({problem.msg})") from None
        yield from _json_lines(path)
        return
    if isinstance(found, dict):  # {"data": [...]}, or a single row
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(found) == len(lists) == 1 else [found]
    if not isinstance(found, list):
        raise ValueError(f"{path}: a list of JSON objects is expected")
    yield from enumerate(found, start=1)


def _filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in numbered_lines(path) if line.strip())


def _tabbed(path: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in _filled_lines(path))


def _delimiter(first: str) -> str:
    """A comma if there is one outside of quotation marks, else what there is most of."""
    plain = re.sub(r'"[^"]*"', "", first)
    return "," if "," in plain else max(",;\t", key=plain.count)


def _quoted(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST_FIELD))
    lines = numbered_lines(path)
    first = next(lines, (1, ""))
    reader = csv.reader((line + "\n" for _, line in chain([first], lines)), strict=True, delimiter=_delimiter(first[1]))
    begin = 1
    try:
        for cells in reader:
            if cells:
                yield begin, cells
            begin = reader.line_num + 1
    except csv.Error as problem:
        raise ValueError(f"{path}, line {begin}: {problem}") from None
