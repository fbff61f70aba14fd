"""`heedful models`: what ships, the families, and every published size."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The family, if only one is to be listed."""
    parser.add_argument("family", nargs="?", help="only this family")


def run(options: argparse.Namespace) -> int:
    """Print the lists."""
    from heedful.models.config import did_you_mean
    from heedful.models.registry import FAMILIES, sizes
    from heedful.zoo import cards

    if options.family and options.family not in FAMILIES:
        hint = did_you_mean(options.family, FAMILIES) or f": {', '.join(FAMILIES)} are"
        raise ValueError(f"no family is called {options.family!r}{hint}")
    if not options.family and cards():
        print("Ship with heedful, load by name:")
        for name, about in cards().items():
            print(f"  {name:<22} {about}")
        print()
    for name, family in FAMILIES.items():
        if options.family in (None, name):
            print(f"{name}: {family.about}")
            for size in sizes().values():
                if size.family == name:
                    print(f"  {size.name:<22} {short_count(size.parameters):>8} parameters")
    if not options.family:
        print("\nheedful info NAME says more; heedful.create(NAME) in Python makes a new one of that size.")
    return 0


def short_count(n: int) -> str:
    """124439808 -> 124M"""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.3g}{name}"
    return str(n)
