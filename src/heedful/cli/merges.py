"""`heedful merges`: byte-pair encoding step by step."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text."""
    parser.add_argument("text", help="for example aaabdaaabac")


def run(options: argparse.Namespace) -> int:
    """Print every merge and the text after it."""
    from heedful.text import trace_merges

    print(trace_merges(options.text))
    return 0
