"""`heedful export`: a model as a folder in the hub's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from heedful.cli.arguments import MODEL

QUANTIZED = ("int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the folder, the type of the weights."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("folder", type=Path, help="where to; must not exist yet")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", *QUANTIZED],
        help="convert the weights; int8 and int4 (a quarter and a seventh of float32; in compressed-tensors' layout) "
        "are for heedful: others may not read them",
    )
    parser.add_argument(
        "--calibrate", metavar="DATA",
        help="a classifier: labelled data (.tsv, .csv, .jsonl, images) that it was not trained on, to which its "
        "probabilities are fitted by dividing its logits by one temperature",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Load and save."""
    if options.folder.exists():
        raise ValueError(f"{options.folder} exists already: choose another name or remove it")
    import torch

    import heedful

    quantize = options.dtype if options.dtype in QUANTIZED else None
    dtype = getattr(torch, options.dtype) if options.dtype and not quantize else None
    loaded = heedful.load(options.model, dtype=dtype)
    if options.calibrate:
        from heedful.evaluate.calibration import calibrate
        from heedful.recipes.data_paths import find_data

        temperature = calibrate(loaded, find_data(options.calibrate) or options.calibrate)
        print(f"the logits were divided by {temperature:.3f}")
    loaded.save(options.folder, quantize=quantize)
    print(f"{loaded.name} written to {options.folder}")
    return 0
