"""Streams text from a file or a folder, with at most a few megabytes in memory.

    .txt .md and every other text file   one document, or several separated by lines with only a form feed
    .jsonl .ndjson                       a document per line: its "text", its only string, or the given `field`
    .csv .tsv                            a document per row: the column "text", or the only one, or the `field`
    any of these and .gz .xz .bz2        the same, compressed

Text is UTF-8, or UTF-16 and UTF-32 with a byte order mark. Bytes that are not valid UTF-8 are decoded one by one as
Windows-1252 (a superset of Latin-1), which handles Latin-1 files and UTF-8 files with a few other lines; the notes have
their number. Line breaks become "\\n". Files that are not text are rejected; in a folder they are skipped, with a note.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from heedful.text.parse import parse_json

PIECE = 2**16  # characters after which a document is cut into pieces
LONGEST = 2**20  # characters after which it is cut even without a space
CHUNK = 2**20  # bytes read at a time
ROW = 2**28  # characters of the longest row of a table

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Where a document may be cut: no tokenizer has a token that spans a word and the space after it. Line breaks are less
# safe (LLaMA 3 has tokens like ".\n"), so only text without spaces is cut there, after a single line break.
BEFORE_SPACE = re.compile(r"(?<=\S)(?= )")
AFTER_LINE = re.compile(r"(?<=\S\n)(?=\S)")
FORM_FEED = re.compile(r"(?<=\n)\f\n")
NOT_UTF8 = re.compile("[\udc80-\udcff]")
WINDOWS = {  # surrogate of an undecodable byte -> its character
    0xDC00 + byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(128, 256)
}
CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b")) + b"\x7f"  # ESC is allowed: terminal logs have colour codes


class TextSource:
    """The text of a file, or of all files in a folder, in the order of their names.

    `notes` report encodings and skipped files; reading adds to them.
    """

    def __init__(self, path: str | Path, *, field: str = "") -> None:
        self.path = Path(os.path.expanduser(path))
        self.field = field
        self._notes: dict[str, None] = {}  # an ordered set: reading twice adds no note twice
        if self.path.is_dir():
            self.files = self._in_folder()
        elif self.path.exists():
            problem = self._problem(self.path)
            if problem is not None:
                raise ValueError(f"{self.path} {problem}")
            self.files = [self.path]
        else:
            raise ValueError(f"there is no file or folder {self.path}")

    def __repr__(self) -> str:
        return f"Source({str(self.path)!r}, {len(self.files)} files)"

    @property
    def notes(self) -> list[str]:
        """Encodings, and files and rows that were skipped."""
        return list(self._notes)

    def _note(self, text: str) -> None:
        self._notes[text] = None

    # --- finding files ---------------------------------------------------------------------------------------------

    def _in_folder(self) -> list[Path]:
        inside = self.path.resolve()
        found, n_hidden = [], 0
        for folder, folders, names in os.walk(self.path):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            visible = [name for name in [*names, *links] if not name.startswith(".")]
            n_hidden += len(names) + len(links) - len(visible)
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(folder, name) for name in visible]
        if n_hidden:
            self._note(f"{n_hidden} hidden files were left out")
        files = []
        for path in sorted(found, key=self._name):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise ValueError(
                    f"{path} is a link out of the folder; give what it points to as a source of its own, or copy it"
                )
            problem = self._problem(path)
            if problem is None:
                files.append(path)
            else:
                self._note(f"{self._name(path)} {problem}; left out")
        if not files:
            raise ValueError("\n".join([f"there is no text in the folder {self.path}", *self.notes]))
        return files

    def _name(self, path: Path) -> str:
        return path.name if path == self.path else path.relative_to(self.path).as_posix()

    def _problem(self, path: Path) -> str | None:
        """Why this file cannot be read as text, by its first bytes; None if it can."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                return "is no ordinary file"
            with _open(path) as file:
                head = file.read(CHUNK)
            encoding, skip = _encoding(head)
            if len(head) < CHUNK and not head[skip:].strip():
                return "is empty"
            if encoding == "utf-8":
                if b"\0" in head:
                    return "is not text: it has NUL bytes"
                if sum(map(head[:4096].count, CONTROL)) > 0.05 * len(head[:4096]):
                    return "is not text: it is full of control characters"
            if _kind(path) != "text":
                next(self._rows(path), None)
        except _UNREADABLE as error:
            return f"cannot be read: {error}"
        except ValueError as error:
            return f"cannot be read: {str(error).removeprefix(f'{path}: ')}"
        return None

    def fingerprint(self) -> str:
        """A digest of the files' contents and names, and of the field."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_digest, self.files))
        # Of a single file only the suffixes count, which decide how it is read.
        alone = self.files == [self.path]
        names = ["".join(path.suffixes[-2:]) if alone else self._name(path) for path in self.files]
        made_of = json.dumps([self.field, names, digests])
        return hashlib.blake2b(made_of.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    # --- reading ---------------------------------------------------------------------------------------------------

    def texts(self) -> Iterator[str]:
        """The text of all pieces, for training a tokenizer."""
        return (text for text, _ in self.pieces())

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(text, whether its document ends with it), none empty. The pieces of a document concatenate to its text."""
        for path in self.files:
            yield from _cut(self._documents(path))

    def _documents(self, path: Path) -> Iterator[tuple[str, bool]]:
        if _kind(path) == "text":
            yield from _at_form_feeds(self._characters(path))
        else:
            for text in self._rows(path):
                yield text.replace("\r\n", "\n").replace("\r", "\n"), True

    def _characters(self, path: Path) -> Iterator[str]:
        """The decoded file in chunks, with line breaks normalized."""
        n_foreign = 0
        lines = io.IncrementalNewlineDecoder(None, translate=True)
        try:
            with _open(path) as file:
                chunk = file.read(CHUNK)
                encoding, skip = _encoding(chunk)
                if encoding != "utf-8":
                    self._note(f"{self._name(path)} was read as {encoding.upper()}")
                decoder, chunk = codecs.getincrementaldecoder(encoding)(), chunk[skip:]
                while True:
                    text, n = _decode(decoder, chunk)
                    n_foreign += n
                    if "\0" in text:
                        raise ValueError(f"{path}: a NUL character: this is not text")
                    yield lines.decode(text, final=not chunk)
                    if not chunk:
                        break
                    chunk = file.read(CHUNK)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: it begins like {encoding.upper()} but is not: {error.reason}") from None
        except _UNREADABLE as error:
            raise ValueError(f"{path}: cannot be read to its end: {error}") from None
        if n_foreign:
            self._note(f"{self._name(path)}: {n_foreign:,} bytes are not UTF-8 and were read as Windows-1252 (Latin-1)")

    def _rows(self, path: Path) -> Iterator[str]:
        """The texts of a table."""
        lines = _lines(path, self._characters(path))
        rows = self._of_objects(path, lines) if _kind(path) == "jsonl" else self._of_columns(path, lines)
        n_empty = 0
        for text in rows:
            n_empty += not text
            if text:
                yield text
        if n_empty:
            self._note(f"{self._name(path)}: {n_empty:,} empty rows were left out")

    def _of_objects(self, path: Path, lines: Iterator[str]) -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: line {number} is no JSON: {error}") from None
            text = self._chosen(row)
            if text is None:
                raise ValueError(f"{path}: line {number} {self._wanted(row)}")
            yield _whole_characters(text)

    def _chosen(self, row: Any) -> str | None:
        if isinstance(row, str) and not self.field:
            return row
        if not isinstance(row, dict):
            return None
        value = row.get(self.field or "text")
        if value is None and not self.field:
            strings = [entry for entry in row.values() if isinstance(entry, str)]
            value = strings[0] if len(strings) == 1 else None
        return value if isinstance(value, str) else None

    def _wanted(self, row: Any) -> str:
        names = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        if self.field:
            return f"has no text {self.field!r}; it has: {names}"
        return f'has no "text"; it has: {names}; say which is the text: data.text = "NAME"'

    def _of_columns(self, path: Path, lines: Iterator[str]) -> Iterator[str]:
        csv.field_size_limit(ROW)  # the default limit is 128 KB
        first = next(lines, "")
        if path.name.lower().removesuffix(_compression(path)).endswith(".tsv"):
            style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        else:
            style = {"delimiter": max(",;\t", key=first.count)}
        rows = csv.reader((line + "\n" for line in _before([first], lines)), **style)
        try:
            names = [name.strip() for name in next(rows, [])]
            column = self._column(path, names)
            for row in rows:
                if row and len(row) <= column:
                    raise ValueError(f"{path}: line {rows.line_num} has {len(row)} of {len(names)} columns")
                if row:
                    yield row[column]
        except csv.Error as error:
            raise ValueError(f"{path}: line {rows.line_num}: {error}; is a quotation mark not closed?") from None

    def _column(self, path: Path, names: list[str]) -> int:
        wanted = self.field or "text"
        if wanted in names:
            return names.index(wanted)
        if len(names) == 1 and not self.field:
            return 0
        raise ValueError(
            f"{path}: no column {wanted!r}; its columns are: {', '.join(names)};"
            ' say which is the text: data.text = "NAME"'
        )


# --- bytes to characters ---------------------------------------------------------------------------------------------

_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)


def _compression(path: Path) -> str:
    suffix = path.suffix.lower()
    return suffix if suffix in OPENERS else ""


def _kind(path: Path) -> str:
    inner = path.name.lower().removesuffix(_compression(path))
    if inner.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "table" if inner.endswith((".csv", ".tsv")) else "text"


def _open(path: Path) -> IO[bytes]:
    opener = OPENERS.get(_compression(path), open)
    file: IO[bytes] = opener(path, "rb")
    return file


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def find_encoding(head: bytes) -> str:
    """The encoding of a file by its first four bytes."""
    return _encoding(head)[0]


def _encoding(head: bytes) -> tuple[str, int]:
    """The encoding by the byte order mark, and the length of the mark."""
    return next(((name, len(mark)) for mark, name in MARKS if head.startswith(mark)), ("utf-8", 0))


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes) -> tuple[str, int]:
    """The text of a chunk and the number of bytes that were not UTF-8; an empty chunk is the end of the file."""
    try:
        return decoder.decode(chunk, not chunk), 0
    except UnicodeDecodeError as error:
        if error.encoding != "utf-8":
            raise
    decoder.errors = "surrogateescape"  # the decoder's state is that before the chunk
    text = decoder.decode(chunk, not chunk)
    decoder.errors = "strict"
    return text.translate(WINDOWS), len(NOT_UTF8.findall(text))


def _whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can contain, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# --- characters to documents, lines and pieces -----------------------------------------------------------------------


def _at_form_feeds(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Split documents at lines with only a form feed."""
    before, held = "\n", ""  # the last character so far; a form feed that may be a whole line
    for chunk in chunks:
        text, begin = before + held + chunk, 1
        for found in FORM_FEED.finditer(text):
            yield text[begin : found.start()], True
            begin = found.end()
        held = "\f" if text.endswith("\n\f") else ""
        end = len(text) - len(held)
        yield text[begin:end], False
        before = text[end - 1]
    yield "", True


def _lines(path: Path, chunks: Iterable[str]) -> Iterator[str]:
    """Lines without their line break "\\n" (str.splitlines splits at other characters too)."""
    held: list[str] = []
    for chunk in chunks:
        first, *rest = chunk.split("\n")
        held.append(first)
        for line in rest:
            yield "".join(held)
            held = [line]
        if sum(map(len, held)) > ROW:
            raise ValueError(f"{path}: a row is longer than {ROW:,} characters; cut it into several")
    if held != [""]:
        yield "".join(held)


def _before(first: Iterable[str], rest: Iterable[str]) -> Iterator[str]:
    yield from first
    yield from rest


def _cut(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Cut documents into pieces that end between words; empty documents are dropped."""
    held = ""
    for text, ends in parts:
        held, begin = held + text, 0
        while len(held) - begin > PIECE:
            end = _border(held, begin)
            if end is None:
                break
            yield held[begin:end], False
            begin = end
        held = held[begin:]
        if ends:
            if held:
                yield held, True
            held = ""


def _border(text: str, begin: int) -> int | None:
    """End of the piece that begins here; None if more text or the end of the document is needed to decide."""
    enough, most = begin + PIECE, begin + LONGEST
    found = BEFORE_SPACE.search(text, enough, most)
    if found is None and len(text) > most:
        found = AFTER_LINE.search(text, enough, most)
        return most if found is None else found.start()
    return None if found is None else found.start()
