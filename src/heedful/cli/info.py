"""`heedful info`: what a model is, or what heedful runs on here."""

from __future__ import annotations

import argparse
from pathlib import Path

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

    print("\n".join([describe_model(options.name), *score_lines(Path(options.name))]))
    return 0


def score_lines(run: Path) -> list[str]:
    """A line for each task that a run was evaluated on with `heedful eval`, with its first scores."""
    if not (run / "evaluations").is_dir():
        return []
    from heedful.evaluate.evaluation import EVALUATIONS, saved_scores
    from heedful.evaluate.report import format_saved

    return [f"{'score':<14}{format_saved(result)}" for result in saved_scores(run / EVALUATIONS)]
