"""`heedful export`: a model as a folder in the hub's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from heedful.cli.arguments import MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the folder, the type of the weights."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("folder", type=Path, help="where to; must not exist yet")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="convert the weights")


def run(options: argparse.Namespace) -> int:
    """Load and save."""
    if options.folder.exists():
        raise ValueError(f"{options.folder} exists already: choose another name or remove it")
    import torch

    import heedful

    dtype = getattr(torch, options.dtype) if options.dtype else None
    loaded = heedful.load(options.model, dtype=dtype)
    loaded.save(options.folder)
    print(f"{loaded.name} written to {options.folder}")
    return 0
