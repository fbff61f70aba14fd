"""`heedful info`: what a model is, or what heedful runs on here."""

from __future__ import annotations

import argparse

from heedful.cli.arguments import MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, which may be left out."""
    parser.add_argument(
        "name",
        nargs="?",
        help=f"{MODEL}; or the name of a published size; without one: versions, devices, kernels, threads and cache",
    )


def run(options: argparse.Namespace) -> int:
    """Print the description of the model or of the environment."""
    if options.name is None:
        from heedful.kernels.environment import describe_environment

        print(describe_environment())
        return 0
    from heedful.weights.describe import describe_model

    print(describe_model(options.name))
    return 0
