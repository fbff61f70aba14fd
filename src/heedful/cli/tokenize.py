"""`heedful tokenize`: the tokens of a text."""

from __future__ import annotations

import argparse
import sys

from heedful.cli.arguments import MODEL

DEFAULT = "books"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, or a tokenizer's folder, and the text."""
    parser.add_argument("model", nargs="?", help=f"{MODEL}; or a folder with a tokenizer alone (default: {DEFAULT})")
    parser.add_argument("text")


def run(options: argparse.Namespace) -> int:
    """Print a line per token: its id, the token, and the characters it stands for."""
    from heedful.weights.describe import load_tokenizer
    from heedful.weights.resolve import is_local

    if options.model is None:
        if is_local(options.text):
            raise ValueError(f"which text? heedful tokenize {options.text} TEXT")
        print(f"tokenizer of {DEFAULT}; for another: heedful tokenize MODEL TEXT", file=sys.stderr)
    tokenizer = load_tokenizer(options.model or DEFAULT)
    for token, start, end in tokenizer.encode_with_offsets(options.text):
        print(f"{token:>7}  {tokenizer.token(token)!r:<24} {options.text[start:end]!r}")
    return 0
