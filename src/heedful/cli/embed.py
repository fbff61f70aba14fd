"""`heedful embed`: texts as vectors: JSON lines, an array in a file, or a table of how alike they are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.cli.arguments import add_model, add_quantize
from heedful.cli.inputs import add_inputs, count_inputs, input_batches
from heedful.cli.results import add_json, progress_bar, shorten, write_results
from heedful.text.plural import counted

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".npy", ".safetensors")
MOST_COMPARED = 12  # texts of a table on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The texts, the model, how to pool, the file."""
    add_inputs(parser, "TEXT", "a text to embed")
    add_model(parser, "bert-books")
    add_quantize(parser)
    parser.add_argument("--pool", choices=["mean", "first", "last"], help="how (default: as the model's files say)")
    parser.add_argument("--normalize", action="store_true", default=None, help="scale the vectors to length 1")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="truncate longer texts to this many")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the vectors (N, E) as {' or '.join(ENDINGS)}")
    add_json(parser)
    parser.set_defaults(wanted="a text to embed")


def run(options: argparse.Namespace) -> int:
    """Write the vectors; on a terminal compare those of several texts."""
    from heedful.cli.arguments import load_model

    if options.out is not None and options.out.suffix not in ENDINGS:
        raise ValueError(f"{options.out}: vectors are written as {' or '.join(ENDINGS)}")
    batches, total = input_batches(options), count_inputs(options)
    loaded = load_model(options.model, "embed", options.device, options.quantize)

    def compute(texts: list[str]) -> Tensor:
        return loaded.embed(texts, pool=options.pool, normalize=options.normalize, max_tokens=options.max_tokens).cpu()

    compared = not options.json and sys.stdout.isatty() and (total or 0) > 1
    if options.out is None and not compared:
        options.json = True
        return write_results(
            options, batches, lambda texts: compute(texts).tolist(), total=total,
            record=lambda vector: {"embedding": vector}, text=lambda _, vector: str(vector),
        )  # fmt: skip
    texts, parts = [], []
    with progress_bar(total) as advance:
        for batch in batches:
            texts += batch
            parts.append(compute(batch))
            advance(len(batch))
    if options.out is not None:
        save_vectors(parts, options.out)
        print(f"{options.out}: {counted(len(texts), 'vector')} of {loaded.model.config.d_model}")
    else:
        print_similarities(texts, parts)
    return 0


def save_vectors(parts: list[Tensor], path: Path) -> None:
    """Write the vectors as an array (N, E) of float32; in safetensors it is called `embeddings`."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    if not parts:
        raise ValueError("there is no text to embed")
    beside = path.with_name(f".{path.name}.new{path.suffix}")
    try:
        if path.suffix == ".npy":
            np.save(beside, torch.cat(parts).numpy(), allow_pickle=False)
        else:
            save_file({"embeddings": torch.cat(parts)}, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def print_similarities(texts: list[str], parts: list[Tensor]) -> None:
    """Print the cosine similarity of each text with each."""
    import torch

    from heedful.observe.similarity import cosine_similarity

    rows = cosine_similarity(torch.cat(parts)[:MOST_COMPARED]).tolist()
    print("     " + "".join(f"{i + 1:>6}" for i in range(len(rows))))
    for i, row in enumerate(rows):
        numbers = "".join(f"{x:6.2f}" for x in row)
        print(f"{i + 1:>4} {numbers}  {shorten(texts[i], 7 + len(numbers))}")
    if len(texts) > len(rows):
        print(f"the first {len(rows)} of {len(texts)}; --out FILE or --json has all vectors")
