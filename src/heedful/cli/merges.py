"""`heedful merges`: byte-pair encoding step by step, of a text, a file, or a trained tokenizer."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from heedful.text.plural import counted

SHORT = 200  # characters of a text that is printed after every merge; of a longer one, how often the pair occurred
MAX_CHARACTERS = 100_000  # of a file: every merge reads all of it
MAX_TRACED, MAX_WORDS = 10_000, 50  # characters, and different words of them, that a tokenizer merges
MAX_MERGES = 50  # of a file or a tokenizer, unless --max-merges says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text or file, the tokenizer, the number of merges."""
    text = "a text, for example aaabdaaabac, or a text file; with --tokenizer alone, its merges are listed"
    parser.add_argument("text", nargs="?", help=text)
    tokenizer = "merge as this trained tokenizer does: a model that ships, a folder, a .gguf file or a hub id"
    parser.add_argument("--tokenizer", metavar="MODEL", help=tokenizer)
    merges = f"stop after so many (default: until no pair occurs twice; of a file or a tokenizer {MAX_MERGES})"
    parser.add_argument("--max-merges", type=int, metavar="N", help=merges)


def run(options: argparse.Namespace) -> int:
    """Print every merge and what it leads to."""
    from heedful.text import trace_merges

    if options.text is None and options.tokenizer is None:
        raise ValueError("which text? heedful merges TEXT, heedful merges FILE, or --tokenizer MODEL")
    if options.max_merges is not None and options.max_merges < 0:
        raise ValueError(f"--max-merges is {options.max_merges}: it must be 0 or more")
    text, is_file = read_argument(options.text or "")
    most = options.max_merges
    if options.tokenizer is not None:
        given = None if options.text is None else text
        print_tokenizer(options.tokenizer, given, MAX_MERGES if most is None else most)
        return 0
    trace = trace_merges(text, MAX_MERGES if most is None and is_file else most)
    if len(text) <= SHORT:
        print(trace)
    else:
        print("\n".join(f"{merge}\t{counted(merge.count, 'time')}" for merge in trace.merges))
        print(
            f"{counted(len(text), 'character')} became {counted(len(trace.text), 'symbol')} with "
            f"{counted(len(trace.merges), 'merge')}"
        )
    return 0


def read_argument(given: str) -> tuple[str, bool]:
    """The text, or the contents of the file that it names; whether it was a file."""
    from heedful.data.sources import TextSource

    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # longer than a file's name can be, or with a NUL
        is_file = False
    if not is_file:
        return given, False
    text = ""
    for piece in TextSource(given).texts():
        text += piece
        if len(text) > MAX_CHARACTERS:
            print(f"(the first {MAX_CHARACTERS:,} characters of {given})")
            break
    return text[:MAX_CHARACTERS], True


def print_tokenizer(name: str, text: str | None, most: int) -> None:
    """The merges of a text by a trained tokenizer, word by word; without a text, the first that it has learned."""
    from heedful.text import learned_merges, trace_tokenizer
    from heedful.weights.describe import load_tokenizer

    tokenizer = load_tokenizer(name)
    if text is not None:
        words = dict.fromkeys(trace_tokenizer(tokenizer, text[:MAX_TRACED]))
        print("\n".join(map(str, islice(words, MAX_WORDS))))
        if len(words) > MAX_WORDS or len(text) > MAX_TRACED:
            print(f"(the first {counted(min(len(words), MAX_WORDS), 'word')})")
        return
    merges = learned_merges(tokenizer)
    for rank, (first, second) in enumerate(merges[:most], 1):
        print(f"{rank:>7}  {first} + {second} = {first}{second}")
    print(f"({min(most, len(merges)):,} of {counted(len(merges), 'merge')})")
