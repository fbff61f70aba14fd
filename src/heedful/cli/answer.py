"""`heedful answer`: the span of a passage that answers a question."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from heedful.cli.arguments import add_model
from heedful.cli.inputs import batched, is_piped, read_whole
from heedful.cli.results import add_json, shorten, write_results

NOT_THERE = "(not in the passage)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The questions, the passage, the model."""
    parser.add_argument(
        "words", nargs="*", metavar="QUESTION",
        help="a question, or several; the last argument is the passage, unless that comes from --file or a pipe",
    )  # fmt: skip
    parser.add_argument("--file", type=Path, metavar="FILE", help="the passage is this text file (UTF-8)")
    add_model(parser, "reader")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the answer to each question."""
    from heedful.cli.arguments import load_model
    from heedful.tasks.answer import AnswerSpan

    questions, passage = read_questions(options)
    loaded = load_model(options.model, "answer", options.device)

    def text(asked: str, span: AnswerSpan) -> str:
        said = span.text or NOT_THERE
        return said if len(questions) == 1 else f"{shorten(asked)}\n  {said}"

    return write_results(
        options, batched(questions), lambda asked: loaded.answer(asked, [passage] * len(asked)), total=len(questions),
        record=asdict, text=text,
    )  # fmt: skip


def read_questions(options: argparse.Namespace) -> tuple[list[str], str]:
    """The questions, and the passage that they are about."""
    words = list(options.words)
    if options.file is not None:
        passage = read_whole(options.file)
    elif words[1:] and words[-1] != "-":
        passage = words.pop()
    elif words and is_piped():
        passage = sys.stdin.read()
        words = [word for word in words if word != "-"]
    else:
        raise ValueError("give a question and a passage: heedful answer QUESTION PASSAGE, or --file FILE, or a pipe")
    if not words:
        raise ValueError("which question? heedful answer QUESTION --file FILE")
    return words, passage
