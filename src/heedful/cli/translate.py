"""`heedful translate`: texts by an encoder-decoder, a line for each."""

from __future__ import annotations

import argparse
from typing import Any

from heedful.cli.arguments import add_model
from heedful.cli.inputs import add_inputs, count_inputs, input_batches
from heedful.cli.results import add_json, write_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The texts, the model, how to search."""
    parser.epilog = "translator, the default, reads German or English and writes the other: it sees which one it reads."
    add_inputs(parser, "TEXT", "a text to translate")
    add_model(parser, "translator")
    parser.add_argument("--beams", type=int, metavar="N", help="beams of the search; 1: greedy (default: the model's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most this many tokens of a translation")
    add_json(parser)
    parser.set_defaults(wanted="a text to translate")


def run(options: argparse.Namespace) -> int:
    """Print the translations; that of an empty line is empty."""
    from heedful.cli.arguments import load_model

    batches, total = input_batches(options, keep_blank=True), count_inputs(options, keep_blank=True)
    loaded = load_model(options.model, "translate", options.device)
    given: dict[str, Any] = {"beams": options.beams, "max_tokens": options.max_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    return write_results(
        options, batches, lambda texts: loaded.translate(texts, **given), total=total,
        record=lambda translation: {"translation": translation}, text=lambda _, translation: translation,
    )  # fmt: skip
