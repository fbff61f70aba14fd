"""`heedful train-tokenizer`: a tokenizer from text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.text import Tokenizer

KINDS = ["bpe", "wordpiece", "unigram", "words", "characters", "bytes"]
VOCAB_SIZE = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, the kind of tokenizer, the size of its vocabulary, the folder."""
    files = "text files or folders of them, .jsonl and .csv too; bytes need none"
    size = f"at most so many tokens (default {VOCAB_SIZE}; characters: all of the text)"
    parser.add_argument("files", nargs="*", type=Path, help=files)
    parser.add_argument("--kind", choices=KINDS, default="bpe", help="default bpe, on bytes as in GPT-2")
    parser.add_argument("--vocab-size", type=int, metavar="N", help=size)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")


def run(options: argparse.Namespace) -> int:
    """Train and save it."""
    if options.out.exists():
        raise ValueError(f"{options.out} exists already: choose another name or remove it")
    tokenizer = train_on_files(options.kind, options.files, options.vocab_size)
    tokenizer.save(options.out)
    n, wanted = len(tokenizer), options.vocab_size
    fewer = f" (of {wanted}: the text has no more to learn)" if wanted is not None and n < wanted else ""
    print(f"{n} tokens written to {options.out}{fewer}")
    return 0


def train_on_files(kind: str, files: list[Path], vocab_size: int | None) -> Tokenizer:
    """A tokenizer of one of KINDS; only that of bytes needs no text."""
    from heedful import text
    from heedful.data.sources import TextSource

    if kind == "bytes":
        found = text.byte_tokens()
        if vocab_size not in (None, len(found)):
            raise ValueError(f"a tokenizer of bytes has {len(found)} tokens: leave --vocab-size out")
        return found
    if not files:
        raise ValueError("which text? heedful train-tokenizer FILE ... --out FOLDER")
    sources = [TextSource(path) for path in files]
    texts: Iterator[str] = (piece for source in sources for piece in source.texts())
    makers: dict[str, Callable[..., Tokenizer]] = {
        "bpe": text.train_bpe,
        "wordpiece": text.train_wordpiece,
        "unigram": text.train_unigram,
        "words": text.words,
        "characters": text.characters,
    }
    size = VOCAB_SIZE if vocab_size is None and kind != "characters" else vocab_size
    found = makers[kind](texts, size)
    for note in (note for source in sources for note in source.notes):
        print(f"heedful: {note}", file=sys.stderr)
    return found
