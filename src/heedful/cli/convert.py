"""`heedful convert`: pickled weights as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and the folder."""
    parser.add_argument("model", help="a folder with pytorch_model.bin, such a file, or a hub id (org/name)")
    parser.add_argument("folder", type=Path, help="where to; must not exist yet")


def run(options: argparse.Namespace) -> int:
    """Convert, in a process of its own that reads tensors alone."""
    if options.folder.exists():
        raise ValueError(f"{options.folder} exists already: choose another name or remove it")
    from heedful.weights.convert import convert_checkpoint

    n = convert_checkpoint(options.model, options.folder)
    print(f"{n} tensors written to {options.folder}")
    return 0
