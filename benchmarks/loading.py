"""Time to load GPT-2 124M (float32, 498 MB) from a folder in the hub's layout, on the CPU.

    python benchmarks/loading.py [--runs 9]

safetensors memory-maps a file, so `load_file` alone reads nothing; it is timed with every byte read once, and with all
tensors copied to memory of their own, as heedful does. Runs alternate between the programs, with the file in the page
cache. GPT-2's matrices are stored transposed: heedful's time includes transposing them, transformers leaves them
transposed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import heedful
from heedful.weights.save import save


def read_all(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.sum()


def programs(folder: Path) -> dict[str, Callable[[], object]]:
    from transformers import AutoModelForCausalLM

    file = folder / "model.safetensors"
    return {
        "safetensors load_file, mapped, every byte read": lambda: read_all(load_file(file)),
        "safetensors load_file, memory of its own (copy)": lambda: {
            name: tensor.clone() for name, tensor in load_file(file).items()
        },
        "safetensors load_file, memory of its own (pread)": lambda: load_file(file, backend="pread"),
        "heedful.load": lambda: heedful.load(folder),
        "transformers from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(folder),
        "transformers from_pretrained, every byte read": lambda: read_all(
            AutoModelForCausalLM.from_pretrained(folder).state_dict()
        ),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "gpt2"
        save(heedful.create("gpt2"), folder)
        size = (folder / "model.safetensors").stat().st_size
        times: dict[str, list[float]] = {}
        for turn in range(arguments.runs + 1):  # the first is a warm-up, with imports
            for name, load in programs(folder).items():
                begin = time.perf_counter()
                result = load()
                took = time.perf_counter() - begin
                del result
                if turn:
                    times.setdefault(name, []).append(took)
    print(f"GPT-2 124M, {size / 1e6:.0f} MB, {torch.get_num_threads()} threads, {arguments.runs} runs")
    print(f"{'':50} {'median s':>9} {'fastest':>9} {'GB/s':>6}")
    for name, took in times.items():
        median = statistics.median(took)
        print(f"{name:50} {median:9.3f} {min(took):9.3f} {size / median / 1e9:6.1f}")


if __name__ == "__main__":
    main()
