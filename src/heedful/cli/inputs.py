"""The inputs of a command: its arguments, then the lines of files, then those of standard input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

BATCH = 32  # inputs that a model gets at once
CHUNK = 2**16  # bytes of a file or pipe that are read at once
LONGEST_LINE = 2**24  # bytes


def add_inputs(parser: argparse.ArgumentParser, metavar: str, about: str) -> None:
    """The inputs as arguments, and --file."""
    parser.add_argument("inputs", nargs="*", metavar=metavar, help=f"{about}; - or a pipe: each line of standard input")
    parser.add_argument(
        "--file", action="append", default=[], type=Path, metavar="FILE",
        help="each line of a text file (UTF-8); may be repeated",
    )  # fmt: skip


def input_batches(options: argparse.Namespace, *, keep_blank: bool = False) -> Iterator[list[str]]:
    """The inputs in order, in batches; blank lines of files and pipes are left out unless they are kept."""
    if not options.inputs and not options.file and not is_piped():
        raise ValueError(f"give {options.wanted} as an argument, lines by --file FILE, or through a pipe")
    return _input_batches(options, keep_blank)


def _input_batches(options: argparse.Namespace, keep_blank: bool) -> Iterator[list[str]]:
    yield from batched(text for text in options.inputs if text != "-")
    for path in options.file:
        with path.open("rb", buffering=0) as file:
            yield from _batches_of_lines(lambda file=file: file.read(CHUNK), str(path), keep_blank)  # type: ignore[misc]
    if "-" in options.inputs or not (options.inputs or options.file):
        yield from _batches_of_lines(_stdin_reader(), "standard input", keep_blank)


def count_inputs(options: argparse.Namespace, *, keep_blank: bool = False) -> int | None:
    """How many inputs there are; None where they come from standard input."""
    if "-" in options.inputs or not (options.inputs or options.file):
        return None
    n = len(options.inputs)
    for path in options.file:
        with path.open("rb") as file:
            n += sum(keep_blank or bool(line.strip()) for line in file)
    return n


def is_piped() -> bool:
    """Whether standard input is there and no terminal."""
    return sys.stdin is not None and not sys.stdin.isatty()


def read_whole(path: Path) -> str:
    """A text file as one input."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is no text in UTF-8: {problem}") from None


def batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of at most BATCH."""
    rest = iter(texts)
    while found := list(islice(rest, BATCH)):
        yield found


def _stdin_reader() -> Callable[[], bytes]:
    """Reads what has arrived on standard input; nothing at its end."""
    try:
        number = sys.stdin.fileno()
    except (OSError, AttributeError):  # it is no file: a test's, or a notebook's
        return lambda: sys.stdin.read(CHUNK).encode()
    return lambda: os.read(number, CHUNK)


def _batches_of_lines(read: Callable[[], bytes], name: str, keep_blank: bool) -> Iterator[list[str]]:
    """The lines of what arrives, without waiting for a batch to be full."""
    rest, at_begin = b"", True
    while chunk := read():
        rest += chunk.removeprefix(b"\xef\xbb\xbf") if at_begin else chunk
        at_begin = False
        *lines, rest = rest.split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"{name} has a line of more than {LONGEST_LINE:,} bytes")
        yield from batched(_decode(lines, name, keep_blank))
    yield from batched(_decode([rest] if rest else [], name, keep_blank))


def _decode(lines: Iterable[bytes], name: str, keep_blank: bool) -> Iterator[str]:
    for line in lines:
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as problem:
            raise ValueError(f"{name} is no text in UTF-8: {problem}") from None
        if keep_blank or text.strip():
            yield text
