"""`heedful fill`: what a model puts into a blank, and what that goes with."""

from __future__ import annotations

import argparse
from pathlib import Path

from heedful.cli.arguments import MODEL

DEFAULT = "bert-books"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the template, the words, the file."""
    parser.add_argument("model", nargs="?", help=f"{MODEL} (default: {DEFAULT}, or the models that the template names)")
    parser.add_argument(
        "template",
        help='as "In [Texas|New York], they like to buy _."; [MASK] and <mask> are blanks too; a first bracket may '
        'name models: "[bert-books|shakespeare]: My lord, _"',
    )
    parser.add_argument("--words", metavar="A,B,C", help="compare these words alone, separated by commas")
    parser.add_argument("-n", type=int, default=30, metavar="N", help="the likeliest N words of each sentence; 0: all")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a report: .html, .csv, or the chart as .png, .svg, .pdf",
    )


def run(options: argparse.Namespace) -> int:
    """Print the words and what tells the sentences apart; write the fill_report."""
    import torch

    import heedful
    from heedful.observe import fill_report
    from heedful.observe.template import parse_template
    from heedful.weights.resolve import is_local, shipped_models

    if options.out is not None and options.out.suffix.lower() not in fill_report.ENDINGS:
        raise ValueError(f"{options.out}: a report is written as {', '.join(fill_report.ENDINGS)}")
    if options.n < 0:
        raise ValueError(f"-n is {options.n}: it must be 0 or more")
    models = parse_template(options.template, is_local, shipped_models()).models
    if options.model is not None and models and options.model not in models:
        raise ValueError(f"the template names its models, {' and '.join(models)}: leave {options.model} out")
    loaded = heedful.load(options.model or (models[0] if models else DEFAULT), dtype=torch.float32)
    words = None if options.words is None else [word for word in options.words.split(",") if word.strip()]
    found = loaded.fill(options.template, words=words, n=options.n or None)
    if options.out is not None:  # first: whoever reads what is printed may stop early
        fill_report.save_report(found, " and ".join(models) or loaded.name, options.out)
    print(fill_report.report_text(found) + (f"\n\n{options.out}" if options.out is not None else ""))
    return 0
