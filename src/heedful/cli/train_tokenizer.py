"""`heedful train-tokenizer`: a tokenizer from text files."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, the kind of tokenizer, the size of its vocabulary, the folder."""
    kinds = ["bpe", "wordpiece", "unigram", "words", "characters"]
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--kind", choices=kinds, default="bpe")
    parser.add_argument("--vocab-size", type=int, default=8000, metavar="N", help="default 8000")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")


def run(options: argparse.Namespace) -> int:
    """Train and save it."""
    from heedful import text

    if options.out.exists():
        raise ValueError(f"{options.out} exists already: choose another name or remove it")
    texts = [path.read_text(encoding="utf-8") for path in options.files]
    if options.kind in ("words", "characters"):
        tokenizer = getattr(text, options.kind)(texts)
    else:
        tokenizer = getattr(text, f"train_{options.kind}")(texts, options.vocab_size)
    tokenizer.save(options.out)
    print(f"{len(tokenizer)} tokens written to {options.out}")
    return 0
