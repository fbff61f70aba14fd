"""`heedful estimate`: what a training would cost, without running it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from heedful.cli.arguments import RECIPE, add_set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What would be trained, and changes of its recipe."""
    parser.add_argument("what", help=f"{RECIPE}; or the name of a published size, as gpt2 (`heedful models --sizes`)")
    add_set(parser, "change one setting of the recipe; repeatable")


def run(options: argparse.Namespace) -> int:
    """Print the estimate."""
    from heedful.recipes.estimate import estimate_report
    from heedful.recipes.published_size import is_size, size_recipe
    from heedful.recipes.resolve import resolve_recipe
    from heedful.train.recipe import parse_changes

    if not options.what:
        raise ValueError("the name is empty: give a text file, a recipe or the name of a published size")
    changes = parse_changes(options.set)
    published = is_size(options.what) and not Path(options.what).exists()
    resolved = (
        size_recipe(options.what, changes) if published else resolve_recipe(options.what, changes, needs_data=False)
    )
    for note in resolved.notes:
        print(note, file=sys.stderr)
    print(estimate_report(resolved.recipe))
    return 0
