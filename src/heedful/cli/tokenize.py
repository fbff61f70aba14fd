"""`heedful tokenize`: the tokens of a text."""

from __future__ import annotations

import argparse

from heedful.cli.arguments import MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, or a tokenizer's folder, and the text."""
    parser.add_argument("model", help=f"{MODEL}; or a folder with a tokenizer alone")
    parser.add_argument("text")


def run(options: argparse.Namespace) -> int:
    """Print a line per token: its id, the token, and the characters it stands for."""
    from heedful.weights.describe import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    for token, start, end in tokenizer.encode_with_offsets(options.text):
        print(f"{token:>7}  {tokenizer.token(token)!r:<24} {options.text[start:end]!r}")
    return 0
