"""Memory and speed of a model divided over processes (tensor parallelism), against one process with the whole.

    python benchmarks/tensor_parallel.py [--size llama3.2-1b] [--processes 2] [--threads 1]

Writes a model of a published size with random bfloat16 weights, then starts torchrun. Printed for each process: its
parameters, its peak memory while it loads and generates (less what Python and PyTorch take before; one process alone
has its weights in the mapped file), and tokens per second of greedy decoding on the plain path, with --threads threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

import heedful
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.models.base import GenerativeModel
from heedful.weights.save import save

N_TOKENS = 32


def peak() -> float:
    """The most memory that this process ever had, in MB (Linux; getrusage would count its parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def measure(folder: Path, n_threads: int) -> None:
    """Load the folder, whole or this process's part of it, and generate."""
    torch.set_num_threads(n_threads)
    parallel = "RANK" in os.environ
    heedful.load("tiny", tensor_parallel=parallel)  # imports what loading needs, before the first number
    before, begin = peak(), time.perf_counter()
    model = heedful.load(folder, tensor_parallel=parallel).model
    seconds = time.perf_counter() - begin
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    engine = Engine(cast(GenerativeModel[Any], model))
    request = Request((1, 2, 3, 4), max_tokens=N_TOKENS, sampling=Sampling(temperature=0))
    engine.run([request])
    begin = time.perf_counter()
    engine.run([request])
    speed = N_TOKENS / (time.perf_counter() - begin)
    who = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}" if parallel else "one process  "
    print(
        f"{who}: parameters {sum(p.nbytes for p in parts) / 1e6:6.0f} MB, loaded in {seconds:4.1f} s, peak memory "
        f"{peak() - before:6.0f} MB, {speed:5.1f} tokens/s",
        flush=True,
    )
    if parallel:
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="llama3.2-1b")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        return measure(arguments.folder, arguments.threads)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        save(heedful.create(arguments.size).bfloat16(), folder)
        again = [__file__, "--folder", str(folder), "--threads", str(arguments.threads)]
        subprocess.run([sys.executable, *again], check=True)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
        subprocess.run([sys.executable, *torchrun, *again], check=True)


if __name__ == "__main__":
    main()
