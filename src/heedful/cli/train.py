"""`heedful train`: a new run, or the rest of one that was stopped."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.cli.arguments import RECIPE, add_set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train, changes of its recipe, where to."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="[MODEL] DATA",
        help=f"{RECIPE}; before it, a model to fine-tune on that data, as with --init-from. What the data is, is "
        "recognised: texts, texts with labels, pairs of texts, conversations (docs/chat.md), chosen and rejected "
        "answers (docs/preference.md), images in a folder for each class",
    )
    parser.add_argument(
        "--as", dest="kind", default="", choices=["text", "labels", "pairs", "chat", "images"],
        help="what to read the data as, instead of what it is recognised as",
    )  # fmt: skip
    parser.add_argument(
        "--sample",
        action="store_true",
        help="train a recipe on a small sample that comes with heedful, instead of its own data: to see it work",
    )
    add_set(parser, "change one setting of the recipe, as train.steps=200; repeatable")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the run's folder (default: runs/NAME-1 and so on)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run, as if it had never stopped")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --resume: start the run anew at step 1; its checkpoints and logs so far go to RUN/before-1",
    )
    parser.add_argument("--init-from", metavar="MODEL", help="begin from the weights of a model instead of fresh ones")
    parser.add_argument("--list", action="store_true", help="list the recipes that ship, with their results and times")
    parser.add_argument(
        "--stop-on-eof",
        action="store_true",
        help="stop as by Ctrl-C when standard input ends: for a program that starts a training and may die",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only errors")


def stop_on_eof() -> None:
    """Send this process SIGTERM, after which a training saves and stops, when its standard input ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        if os.name == "posix":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            signal.raise_signal(signal.SIGTERM)  # kill would not call the handler there

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def run(options: argparse.Namespace) -> int:
    """List the recipes, resume a run, or start one."""
    from heedful.train.recipe import parse_changes, read_recipe, shipped_recipes

    if options.list:
        for name, path in shipped_recipes().items():
            recipe = read_recipe(path)
            print(f"{name:<24} {recipe.get('about', '')}")
            print(f"{'':<24} {describe_expected(recipe)}")
        return 0
    if options.stop_on_eof:
        stop_on_eof()
    changes = parse_changes(options.set)
    if options.resume is not None:
        if options.what or options.init_from or options.out or options.kind or options.sample:
            raise ValueError(
                "--resume goes on with a run as it is: give it no data, recipe, --init-from, --out, --as or --sample"
            )
        from heedful.recipes.launch import resume

        resume(options.resume, changes, restart=options.restart, quiet=options.quiet)
        return 0
    if options.restart:
        raise ValueError("--restart starts a run anew: say which with --resume RUN")
    if not options.what or "" in options.what:
        raise ValueError("what to train on? Give a text file, a folder or a recipe (`heedful train --list`)")
    *model, what = options.what
    if len(model) + (options.init_from is not None) > 1:
        raise ValueError(
            "a training begins from one model and reads one file, folder or recipe: heedful train MODEL DATA"
        )
    from heedful.recipes.launch import train

    init_from = model[0] if model else options.init_from
    train(
        what,
        changes,
        init_from=init_from,
        kind=options.kind,
        sample=options.sample,
        folder=options.out,
        quiet=options.quiet,
    )
    return 0


def describe_expected(recipe: Mapping[str, Any]) -> str:
    """The scores of a recipe that ships, and the data that they were measured on."""
    source = recipe.get("data", {}).get("source", "")
    expected = recipe.get("expected", "")
    return f"measured on {source}: {expected}" if source and expected else str(expected)
