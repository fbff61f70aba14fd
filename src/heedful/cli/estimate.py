"""`heedful estimate`: what a training would cost, without running it."""

from __future__ import annotations

import argparse
import sys

from heedful.cli.arguments import RECIPE, add_set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What would be trained, and changes of its recipe."""
    parser.add_argument("what", help=RECIPE)
    add_set(parser, "change one setting of the recipe; repeatable")


def run(options: argparse.Namespace) -> int:
    """Print the estimate."""
    from heedful.recipes.estimate import estimate_report
    from heedful.recipes.resolve import resolve_recipe
    from heedful.train.recipe import parse_changes

    found = resolve_recipe(options.what, parse_changes(options.set), needs_data=False)
    for note in found.notes:
        print(note, file=sys.stderr)
    print(estimate_report(found.recipe))
    return 0
