"""`heedful tag`: the entities of texts, as a list or marked in the text."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from heedful.cli.arguments import add_model
from heedful.cli.inputs import add_inputs, count_inputs, input_batches
from heedful.cli.results import add_json, shorten, write_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The texts, the model, how to print."""
    add_inputs(parser, "TEXT", "a text to tag")
    add_model(parser, "entities")
    parser.add_argument("--inline", action="store_true", help="mark the spans in the text: [Mary](PER) lives ...")
    add_json(parser)
    parser.set_defaults(wanted="a text to tag")


def run(options: argparse.Namespace) -> int:
    """Print the labelled spans of each text."""
    from heedful.cli.arguments import load_model

    batches, total = input_batches(options, keep_blank=True), count_inputs(options, keep_blank=True)
    loaded = load_model(options.model, "tag", options.device)

    def text(given: str, spans: list[Any]) -> str:
        if options.inline:
            return mark_spans(given, spans)
        lines = [f"{span.label:<6}  {span.score:6.4f}  {span.text}" for span in spans] or ["(nothing found)"]
        return "\n".join(lines if total == 1 else [shorten(given), *(f"  {line}" for line in lines)])

    return write_results(
        options, batches, loaded.tag, total=total,
        record=lambda spans: {"spans": [asdict(span) for span in spans]}, text=text,
    )  # fmt: skip


def mark_spans(text: str, spans: list[Any]) -> str:
    """ "Mary lives in Paris." -> "[Mary](PER) lives in [Paris](LOC)." """
    pieces, end = [], 0
    for span in spans:
        pieces += [text[end : span.begin], f"[{span.text}]({span.label})"]
        end = span.end
    return "".join([*pieces, text[end:]])
