"""Training on a CPU: tokens per second of heedful and its peers on one small model, in one run.

    python benchmarks/training.py TEXT [--nanogpt FOLDER] [--mingpt FOLDER] [--rounds 12] [--steps 12] [--threads 2]
        [--limit 120] [--only NAME ...]

The model and the loops are in benchmarks/peers/trainers.py: nanoGPT's settings for a CPU, 0.80 million parameters
(heedful, minGPT and transformers have GPT-2's biases too, 0.81 million), 768 tokens a step, no evaluation. Each program
runs in its own process and is set up once; rounds of --steps steps alternate between the programs, so that all are
measured under the same conditions. The table has the median of the rounds, and the ratio to nanoGPT's. Rounds in which
other processes used the CPU are discarded; if --limit seconds pass without a quiet round, the quietest are used. Names
are programs, with "-compiled" (torch.compile), "-bfloat16" or "-dropout" (0.2, as nanoGPT has it on a GPU) appended;
"heedful-plain" is without our kernels. The last ratio is to nanoGPT compiled with the same dropout and precision.

The limit is arithmetic: the FLOPs of a step over the measured FLOP/s of PyTorch's matrix product; the hardware's limit
is a little higher. The bandwidth between cores is printed because it varies: on cores that share no cache (which a
virtual machine does not report) all programs are slower, most of all those that parallelize every operator.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers.trainers import BATCH, LAYERS, LENGTH, WIDTH

TOKENS = BATCH * LENGTH
DROPOUT = 0.2
MAX_OTHER_LOAD = 0.06  # cores that other processes may use in a round that is not discarded
NAMES = (
    "nanogpt", "heedful", "nanogpt-compiled", "heedful-plain", "transformers", "transformers-compiled", "mingpt",
    "mingpt-compiled", "nanogpt-bfloat16", "heedful-bfloat16", "heedful-plain-bfloat16", "nanogpt-compiled-bfloat16",
    "nanogpt-dropout", "heedful-dropout", "heedful-plain-dropout", "nanogpt-compiled-dropout",
)  # fmt: skip


class Worker:
    def __init__(self, name: str, text: Path, folders: dict[str, str], threads: int) -> None:
        program, *how = name.split("-")
        command = [sys.executable, str(Path(__file__).parent / "peers" / "trainers.py"), program, str(text)]
        command += [folders.get(program, ""), "bfloat16" if "bfloat16" in how else "float32"]
        command += ["yes" if "compiled" in how else "no", str(DROPOUT if "dropout" in how else 0.0), str(threads)]
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | ({"HEEDFUL_KERNELS": "0"} if "plain" in how else {}),
        )
        begin = time.perf_counter()
        self.read()
        self.seconds_to_start = time.perf_counter() - begin

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            lines = [text for text in self.errors.read().splitlines() if text.strip()]
            raise RuntimeError(lines[-1] if lines else f"it ended with {self.process.wait()}")
        return line

    def train(self, n: int) -> float:
        """Seconds per step."""
        assert self.process.stdin is not None
        print(n, file=self.process.stdin, flush=True)
        return float(self.read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def matmul_flops_per_second(threads: int) -> float:
    """FLOP/s of a product of 512 x 512 matrices, the best of many."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.rand(512, 512), torch.rand(512, 512)
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * 512**3 / min(times)


def step_flops(vocabulary: int = 65) -> int:
    """FLOPs of the matrix products of a step, with causal attention counted as half of all pairs."""
    weights = LAYERS * 12 * WIDTH**2 + vocabulary * WIDTH
    return TOKENS * (6 * weights + LAYERS * 12 * (LENGTH + 1) // 2 * WIDTH)


def core_to_core_bandwidth(n: int = 2**18) -> float:
    """Bytes per second at which one core reads what another has just written, the best of many."""
    import threading

    import numpy as np

    written, times, processors = np.zeros(n, np.float32), [], sorted(os.sched_getaffinity(0))

    def write(i: int) -> None:
        os.sched_setaffinity(0, processors[-1:])  # of this thread only
        written.fill(i)

    os.sched_setaffinity(0, processors[:1])
    for i in range(40):
        writer = threading.Thread(target=write, args=(i,))
        writer.start()
        writer.join()
        begin = time.perf_counter()
        written.max()
        times.append(time.perf_counter() - begin)
    os.sched_setaffinity(0, processors)
    return written.nbytes / min(times)


def cpu_seconds(place: str) -> float:
    """CPU seconds used by a process (/proc/PID/stat), or by all together (/proc/stat)."""
    line = Path(place).read_text().split("\n", 1)[0]
    numbers = line.split()[1:4] if place == "/proc/stat" else line.rpartition(")")[2].split()[11:13]
    return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")


def measure(workers: dict[str, Worker], options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Seconds per step of each program in the quiet rounds, and 0; or in the quietest rounds, and their number."""
    quiet: list[dict[str, float]] = []
    noisy: list[tuple[float, dict[str, float]]] = []
    end = time.monotonic() + options.limit
    while len(quiet) < options.rounds and (time.monotonic() < end or (not quiet and not noisy)):
        found, others = {}, 0.0
        for name, worker in workers.items():
            own = f"/proc/{worker.process.pid}/stat"
            before, mine, begin = cpu_seconds("/proc/stat"), cpu_seconds(own), time.perf_counter()
            found[name] = worker.train(options.steps)
            other = cpu_seconds("/proc/stat") - before - (cpu_seconds(own) - mine)
            others = max(others, other / (time.perf_counter() - begin))
        if others < MAX_OTHER_LOAD:
            quiet.append(found)
        else:
            noisy.append((others, found))
    noisy.sort(key=lambda round: round[0])
    counted = quiet or [found for _, found in noisy[: max(3, len(noisy) // 4)]]
    return {name: [found[name] for found in counted] for name in workers}, 0 if quiet else len(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--nanogpt", default="", metavar="FOLDER")
    parser.add_argument("--mingpt", default="", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME")
    options = parser.parse_args()
    folders = {"nanogpt": options.nanogpt, "mingpt": options.mingpt}
    workers: dict[str, Worker] = {}
    for name in options.only:
        try:
            workers[name] = Worker(name, options.text.resolve(), folders, options.threads)
        except (RuntimeError, OSError) as error:
            print(f"{name}: not measured, {error}")
    times, noisy = measure(workers, options)
    for worker in workers.values():
        worker.close()
    speed = matmul_flops_per_second(options.threads)
    limit = TOKENS / (step_flops() / speed)
    print(f"products here {speed / 1e9:.0f} GFLOP/s: {limit / 1e3:.1f} k tokens/s if there were nothing else")
    print(f"one core reads what another wrote at {core_to_core_bandwidth() / 1e9:.0f} GB/s")
    if noisy:
        print("others were at work all the time: these are the rounds in which they were least")
    columns = f"{'ms a step':>11}{'best':>8}{'k tokens/s':>12}{'of limit':>10}{'x nanogpt':>11}{'x compiled':>12}"
    print(f"{'program':26}{columns}{'start s':>9}   {len(next(iter(times.values())))} rounds")
    for name, found in times.items():
        step = statistics.median(found)
        settings = [how for how in ("bfloat16", "dropout") if how in name.split("-")]
        ratio, compiled = (
            f"{statistics.median(times[other]) / step:.2f}" if other in times else ""
            for other in ("nanogpt", "-".join(["nanogpt-compiled", *settings]))
        )
        print(
            f"{name:26}{step * 1e3:11.1f}{min(found) * 1e3:8.1f}{TOKENS / step / 1e3:12.1f}"
            f"{TOKENS / step / limit:10.0%}{ratio:>11}{compiled:>12}{workers[name].seconds_to_start:9.1f}"
        )


if __name__ == "__main__":
    main()
