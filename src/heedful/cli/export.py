"""`heedful export`: a model as a folder in the hub's layout, or as a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from heedful.cli.arguments import MODEL

QUANTIZED = ("int8", "int4")
OWN_TEXT = ""  # --calibrate-on without a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the folder or file, the type of the weights."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("folder", type=Path, nargs="?", help="where to; must not exist yet")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE",
        help="write this file instead of a folder: a decoder with its tokenizer, as llama.cpp reads it",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", *QUANTIZED],
        help="convert the weights; int8 and int4 are about a quarter and a seventh of float32: in a folder in "
        "compressed-tensors' layout, which others may not read, in a GGUF file as Q8_0 and Q4_1",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder or file if it exists")
    parser.add_argument(
        "--calibrate", metavar="DATA",
        help="a classifier: labelled data (.tsv, .csv, .jsonl, images) that it was not trained on, to which its "
        "probabilities are fitted by dividing its logits by one temperature",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-on", metavar="TEXT", nargs="?", const=OWN_TEXT,
        help="with --dtype int4: a text file like what the model will be used for (not what it is evaluated on), on "
        "which rounding errors are compensated (GPTQ), so that less is lost; without TEXT a decoder writes one itself",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Load and save."""
    place = options.gguf or options.folder
    if place is None or (options.gguf and options.folder):
        raise ValueError("give either a folder or --gguf FILE to write to")
    if place.exists() and not options.overwrite:
        raise ValueError(f"{place} exists already: choose another name, or --overwrite replaces it")
    if options.calibrate_on is not None and options.dtype != "int4":
        raise ValueError("--calibrate-on is for int4: add --dtype int4")
    text = Path(options.calibrate_on).read_text(encoding="utf-8") if options.calibrate_on else None
    import torch

    import heedful
    from heedful.cli.results import progress_bar
    from heedful.weights.save import hub_equivalent, own_layout_reason

    quantize = options.dtype if options.dtype in QUANTIZED else None
    dtype = getattr(torch, options.dtype) if options.dtype and not quantize else None
    loaded = heedful.load(options.model, dtype=None if options.gguf else dtype)
    if options.calibrate:
        from heedful.evaluate.calibration import calibrate
        from heedful.recipes.data_paths import find_data

        temperature = calibrate(loaded, find_data(options.calibrate) or options.calibrate)
        print(f"the logits were divided by {temperature:.3f}")
    if options.calibrate_on is not None:
        from heedful.generate.calibrate_int4 import calibrate_int4

        print(calibrate_int4(loaded, text))
    if options.gguf:
        loaded.save_gguf(place, dtype=options.dtype, overwrite=options.overwrite, progress=progress_bar)
    else:
        loaded.save(place, quantize=quantize, overwrite=options.overwrite)
    print(f"{loaded.name} written to {place}")
    if options.folder and (reason := own_layout_reason(hub_equivalent(loaded.model, loaded.tokenizer), quantize)):
        print(f"heedful alone reads this folder, transformers does not: {reason}")
    return 0
