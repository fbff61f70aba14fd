"""The C kernels of every target on one model, in one process: decoding, prefill and a training step.

    python benchmarks/targets.py [--model gpt2] [--precision float32 bfloat16 int8 int4] [--rounds 9] [--threads 2]

`native` is the library that the compiler makes with -march=native, for this processor alone; the others are compiled
with the flags of the wheel's libraries, or are those libraries where --prebuilt names their folder. All have the same
packed weights and alternate in every round, in a new order each time. Printed are the medians of native's times, and
each target's as a multiple: the median over rounds of its time by that of native in the same round, with the quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import torch
from torch import Tensor

import heedful
from heedful.kernels import accelerate
from heedful.kernels.cpu import library as kernels
from heedful.kernels.cpu.compile import compiler_platform, compiler_version, find_compiler
from heedful.kernels.cpu.targets import Target, supported_targets
from heedful.paths import cache_folder

NATIVE = Target("native", "", "everything of this processor", ("-march=native",), frozenset())
PROMPT, NEW_TOKENS = 256, 16


def libraries(prebuilt: Path | None) -> dict[str, CDLL]:
    """A library for each target that this processor can run, and the compiler's own choice."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("there is no C compiler for what the targets are compared with")
    version, system = compiler_version(compiler), compiler_platform(compiler)[1]
    kernels.library()  # the OpenMP runtime
    found = {}
    for target in (NATIVE, *supported_targets()):
        path = kernels.cached_library(compiler, version, target, system, cache_folder())
        if prebuilt is not None and target is not NATIVE:
            path = prebuilt / f"{target.name}{kernels.SUFFIX}"
        found[target.name] = kernels._open(path)
    return found


def use(lib: CDLL) -> None:
    """Let all kernels be those of this library from now on."""
    kernels._loaded = lambda: (lib, kernels.Status(True, "chosen by the benchmark"))


@torch.inference_mode()
def inference(name: str, precision: str) -> dict[str, Callable[[], object]]:
    """Decoding with 1 and 8 rows, and the prefill of one prompt."""
    model = heedful.create(name).eval()
    accelerate(model, "inference", precision=precision)
    ids = torch.randint(0, 5000, (8, PROMPT), generator=torch.Generator().manual_seed(0))

    def decode(n_rows: int) -> Callable[[], Tensor]:
        _, state = model.start(ids[:n_rows, :8], capacity=64)

        def steps() -> Tensor:
            for i in range(NEW_TOKENS):
                logits = model.step(ids[:n_rows, i], state)
            state.truncate(8)
            return logits

        return steps

    return {
        f"{precision}, decode 1": decode(1),
        f"{precision}, decode 8": decode(8),
        f"{precision}, prefill {PROMPT}": lambda: model.start(ids[:1]),
    }


def training() -> Callable[[], object]:
    """Forward and backward pass of a small GPT."""
    model = heedful.create("gpt2", n_layers=4, d_model=256, n_heads=4, d_ff=1024, vocab_size=512, max_len=PROMPT)
    accelerate(model, "training")
    ids = torch.randint(0, 512, (8, PROMPT))

    def step() -> None:
        model(ids).logits.square().mean().backward()

    return step


def compare(
    what: str, run: Callable[[], object], libs: dict[str, CDLL], rounds: int, clock: Callable[[], float]
) -> None:
    times: dict[str, list[float]] = {name: [] for name in libs}
    for turn in range(rounds + 1):
        for name in random.sample(list(libs), len(libs)):
            use(libs[name])
            begin = clock()
            run()
            if turn:  # the first is a warm-up
                times[name].append(clock() - begin)
    cells = []
    for name in libs:
        if name != NATIVE.name:
            ratios = [mine / native for mine, native in zip(times[name], times[NATIVE.name], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{median:.2f} ({low:.2f}-{high:.2f})")
    print(f"| {what} | {1e3 * statistics.median(times[NATIVE.name]):.1f} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt2", help="a published size; its weights are random")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16", "float16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prebuilt", type=Path, metavar="FOLDER", help="heedful/kernels/cpu/prebuilt of a wheel")
    parser.add_argument("--busy", action="store_true", help="processor time instead of time, for one thread")
    options = parser.parse_args()
    clock = time.process_time if options.busy else time.perf_counter
    torch.set_num_threads(options.threads)
    libs = libraries(options.prebuilt)
    print(f"{options.threads} threads; {options.model}; times as multiples of native's")
    print("| what | native, ms | " + " | ".join(name for name in libs if name != NATIVE.name) + " |")
    print("|---" * (len(libs) + 1) + "|")
    for precision in options.precision:
        for what, run in inference(options.model, precision).items():
            with torch.inference_mode():
                compare(what, run, libs, options.rounds, clock)
    compare("training step", training(), libs, options.rounds, clock)


if __name__ == "__main__":
    main()
