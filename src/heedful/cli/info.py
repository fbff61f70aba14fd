"""`heedful info`: what a model is."""

from __future__ import annotations

import argparse

from heedful.cli.arguments import MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model."""
    parser.add_argument("name", help=f"{MODEL}; or the name of a published size")


def run(options: argparse.Namespace) -> int:
    """Print the description."""
    from heedful.weights.describe import describe_model

    print(describe_model(options.name))
    return 0
