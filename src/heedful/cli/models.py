"""`heedful models`: what ships with a score each, what was pulled or can be, the families, every published size."""

from __future__ import annotations

import argparse
import json
from typing import Any

from heedful.text.plural import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The family, if only one is to be listed; and how much."""
    parser.add_argument("family", nargs="?", help="this family and its published sizes")
    parser.add_argument("--sizes", action="store_true", help="every published size of all families")
    parser.add_argument("--json", action="store_true", help="all of it as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the lists."""
    from heedful.models.config import did_you_mean
    from heedful.models.registry import FAMILIES

    if options.family is not None and options.family not in FAMILIES:
        hint = did_you_mean(options.family, FAMILIES) or f"; the families are {', '.join(FAMILIES)}"
        raise ValueError(f"no family is called {options.family!r}{hint}")
    listed = collect_models(options.family)
    if options.json:
        print(json.dumps(listed, indent=2))
    elif options.family or options.sizes:
        print_sizes(listed["families"])
    else:
        print_models(listed)
    return 0


def collect_models(family: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """The models that ship, those that can be pulled, and the families with their sizes; or one family alone."""
    from heedful.models.registry import FAMILIES, sizes
    from heedful.weights.catalog import catalog, pulled_models
    from heedful.zoo import FOLDER, cards, read_card

    found: dict[str, list[dict[str, Any]]] = {}
    if family is None:
        shipped = {name: read_card(FOLDER / name) for name in cards()}
        found["shipped"] = [
            {"name": name, "about": card.about, "score": card.score, "scores": [vars(score) for score in card.scores]}
            for name, card in shipped.items()
        ]
        here = pulled_models()
        known = {entry.name: (entry.about, entry.bytes, entry.licence) for entry in catalog().values()}
        found["pull"] = [
            {"name": name, "about": about, "bytes": size, "licence": licence, "pulled": name in here}
            for name, (about, size, licence) in {**{name: ("", 0, "") for name in here}, **known}.items()
        ]
    found["families"] = [
        {"name": name, "about": about.about,
         "sizes": [{"name": s.name, "parameters": s.parameters} for s in sizes().values() if s.family == name]}
        for name, about in FAMILIES.items() if family in (None, name)
    ]  # fmt: skip
    return found


def print_models(listed: dict[str, list[dict[str, Any]]]) -> None:
    """The models that ship with their scores, the pulled ones, those that can be pulled, the families."""
    print("Ship with heedful, load by name:")
    width = max(len(model["score"]) for model in listed["shipped"])
    for model in listed["shipped"]:
        print(f"  {model['name']:<22} {model['score']:<{width}}  {model['about']}")
    for title, pulled in (("Pulled, load by name:", True), ("Can be pulled (heedful pull NAME):", False)):
        chosen = [model for model in listed["pull"] if model["pulled"] == pulled]
        if chosen:
            print(f"\n{title}")
        for model in chosen:
            print(f"  {model['name']:<22} {model['bytes'] / 1e6:>5.0f} MB  {model['about']}")
    print("\nFamilies (heedful models FAMILY lists the published sizes of one, --sizes those of all):")
    for family in listed["families"]:
        n = len(family["sizes"])
        print(f"  {family['name']:<12} {counted(n, 'size') if n else '':<9} {family['about']}")
    print("\nheedful info NAME says more; heedful.create(NAME) in Python makes a new one of a published size.")


def print_sizes(families: list[dict[str, Any]]) -> None:
    """Families with their published sizes."""
    for family in families:
        print(f"{family['name']}: {family['about']}")
        for size in family["sizes"]:
            print(f"  {size['name']:<22} {short_count(size['parameters']):>8} parameters")


def short_count(n: int) -> str:
    """124439808 -> 124M"""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.3g}{name}"
    return str(n)
