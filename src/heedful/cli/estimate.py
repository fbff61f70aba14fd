"""`heedful estimate`: what a training would cost, without running it."""

from __future__ import annotations

import argparse

from heedful.cli.arguments import RECIPE, add_set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What would be trained, and changes of its recipe."""
    parser.add_argument("what", help=RECIPE)
    add_set(parser, "change one setting of the recipe; repeatable")


def run(options: argparse.Namespace) -> int:
    """Print the estimate."""
    from heedful.recipes.estimate import estimate_report
    from heedful.recipes.launch import resolve_recipe
    from heedful.train.recipe import Recipe, merge_tables, parse_changes

    _, recipe = resolve_recipe(options.what)
    print(estimate_report(Recipe.from_dict(merge_tables(recipe, parse_changes(options.set)))))
    return 0
