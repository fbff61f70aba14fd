"""Prefill: seconds to the first token of a long prompt, heedful's engine and transformers in one run.

    python benchmarks/prefill.py [--model smollm2-135m | FOLDER] [--lengths 512 1024 2048 4096 8192] [--rounds 3]
        [--precision float32 bfloat16]

SmolLM2-135M's shape with random weights unless a folder in the hub's layout is given (`heedful export` makes one of a
GGUF file). The engine is the server's: a paged KV cache, prompts read in chunks bounded by time. transformers computes
the same: the prompt's keys and values, and the logits of the last token alone. The two alternate in every round, with a
new prompt each time, so that prefix caching has no effect. A ratio above 1 means that heedful is slower.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import heedful
from generation import make_model_folder
from heedful.generate.engine import Engine
from heedful.generate.request import Request
from heedful.serve.options import Options

Prefill = Callable[[tuple[int, ...]], object]


def with_heedful(folder: Path, precision: str, longest: int) -> Prefill:
    """The server's engine: one new token after the prompt."""
    model = heedful.load(folder, quantize=precision, context_length=longest + 1).model
    given = Options()
    engine = Engine(model, state="paged", cache_tokens=2 * longest + 64, chunk=given.chunk, step_time=given.step_time)
    return lambda prompt: engine.run([Request(prompt=prompt, max_tokens=1)])


def with_transformers(folder: Path, precision: str) -> Prefill:
    """One forward pass that keeps the KV cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()

    @torch.inference_mode()
    def prefill(prompt: tuple[int, ...]) -> object:
        return model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits.argmax()

    return prefill


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds of prefill, side by side")
    parser.add_argument("--model", default="smollm2-135m", help="a published size (random weights) or a folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(options.model)
        if not folder.exists():
            folder = make_model_folder(options.model, Path(place) / options.model, None)
        print(f"{torch.get_num_threads()} threads; medians of {options.rounds} rounds, in seconds", flush=True)
        print("| precision | tokens | heedful | transformers | ratio |\n|---|---|---|---|---|", flush=True)
        for precision in options.precision:
            compare(folder, precision, options.lengths, options.rounds)


def compare(folder: Path, precision: str, lengths: list[int], rounds: int) -> None:
    programs = {
        "heedful": with_heedful(folder, precision, max(lengths)),
        "transformers": with_transformers(folder, precision),
    }
    draw = torch.Generator().manual_seed(0)
    for prefill in programs.values():
        prefill(tuple(range(5, 133)))  # a warm-up
    for length in lengths:
        times: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(rounds):
            prompt = tuple(torch.randint(5, 5000, (length,), generator=draw).tolist())
            for name in sorted(programs, reverse=turn % 2 == 1):
                begin = time.perf_counter()
                programs[name](prompt)
                times[name].append(time.perf_counter() - begin)
        ours, theirs = (statistics.median(times[name]) for name in programs)
        print(f"| {precision} | {length} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
