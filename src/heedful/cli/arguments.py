"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.kernels.packed import Precision
    from heedful.loaded import Loaded
    from heedful.train.distributed import Processes

MODEL = "a model that ships with heedful or was pulled, a folder, a .gguf file or a hub id (org/name)"
RECIPE = (
    "a text file, a folder of text or of images (a subfolder for each class), a recipe that ships (--list) or a "
    "recipe's .toml file"
)


def add_model(parser: argparse.ArgumentParser, default: str | None, about: str = "") -> None:
    """--model, with the model that ships as the default."""
    parser.add_argument("--model", default=default, help=f"{MODEL} (default: {about or default})")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, where models run."""
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE",
        help="cpu, cuda, cuda:N or mps (default: a CUDA GPU where there is one, else Apple's, else the CPU)",
    )  # fmt: skip


def load_model(name: str, ability: str, device: str, quantize: Precision | None = None) -> Loaded:
    """The model of a name, ready for inference; ValueError that says what it is unless it has the ability."""
    import heedful

    loaded = heedful.load(name, device=device, quantize=quantize)
    loaded.require(ability)
    accelerate_if_plain(loaded)
    return loaded


def accelerate_if_plain(loaded: Loaded) -> None:
    """Pack the weights for the kernels as they are stored, unless they are packed already."""
    from heedful.kernels.accelerate import accelerate_as_stored, packed_precision

    if packed_precision(loaded.model) is None:
        accelerate_as_stored(loaded.model)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """--quantize, the type of the weights in memory."""
    kinds = ["float32", "bfloat16", "float16", "int8", "int4"]
    parser.add_argument("--quantize", choices=kinds, help="the weights in this type (default: as they are stored)")


def add_kv_cache(parser: argparse.ArgumentParser) -> None:
    """--kv-cache, the type of keys and values in memory."""
    parser.add_argument(
        "--kv-cache", choices=["int8"],
        help="keys and values in 8 bits, a quarter of the memory of float32 (default: as they are computed)",
    )  # fmt: skip


def add_context_length(parser: argparse.ArgumentParser) -> None:
    """--context-length, the most tokens that a model reads."""
    parser.add_argument(
        "--context-length", type=int, metavar="N",
        help="the most tokens of a prompt and its answer, also beyond what the model was trained for "
        "(rotary positions only; default: what its files say)",
    )  # fmt: skip


def add_tensor_parallel(parser: argparse.ArgumentParser) -> None:
    """--tensor-parallel, the model divided over several processes."""
    parser.add_argument(
        "--tensor-parallel", action="store_true",
        help="divide the model over the processes of torchrun (torchrun --nproc-per-node N -m heedful ...), each on a "
        "GPU of its own where there are GPUs",
    )  # fmt: skip


@contextmanager
def torchrun_processes(device: str) -> Iterator[Processes]:
    """The processes of torchrun, all of which run the command's body; what others than the first print is dropped."""
    from heedful.train.distributed import Processes

    with Processes.start(device) as processes:
        if processes.main:
            yield processes
        else:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield processes


def add_set(parser: argparse.ArgumentParser, about: str) -> None:
    """--set KEY=VALUE, a change of a recipe."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
