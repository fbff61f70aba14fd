"""Generation: tokens per second of heedful and its peers on the same model shape, in one run.

    python benchmarks/generation.py [--model gpt2 | FOLDER] [--batch 1 8] [--rounds 5] [--only NAME ...]
        [--precision NAME ...] [--tokenizer FOLDER] [--nanogpt FOLDER] [--llama-cpp FOLDER [--llama-cpp-build NAME]]
        [--python NAME=PATH ...]

GPT-2 124M's shape with random weights unless a folder in the hub's layout is given (`heedful export` writes one from a
GGUF file). The programs are in benchmarks/peers/programs.py. Each runs in its own process, with the interpreter given
by --python, and loads once; rounds alternate between the programs, so that all are measured under the same conditions
(llama.cpp's own benchmark program is started for each round). A round is a prompt of 128 tokens and 128 new tokens,
greedy; decoding speed excludes the time to the first token. Programs that fail are listed with the reason. llama.cpp
converts only models with a vocabulary it knows: --tokenizer is a folder with GPT-2's.

The limit is memory bandwidth: the bytes of the weights that a step reads, over the measured bandwidth. At batch 1 no
program that reads all weights for each token can be faster.
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

from peers.programs import CONTENDERS, PRECISIONS, PROMPT, LlamaCpp

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
NEW_TOKENS = {"nanogpt": 8}  # fewer for a program without a KV cache
PROBLEMS = (RuntimeError, ValueError, OSError, subprocess.SubprocessError)


class Worker:
    def __init__(self, name: str, precision: str, folder: Path, python: str) -> None:
        program = Path(__file__).parent / "peers" / "programs.py"
        command = [python, str(program), name, precision, str(folder)]
        self.errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self.read()

    def read(self) -> str:
        line: str = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            lines = [text for text in self.errors.read().splitlines() if text.strip()]
            raise RuntimeError(lines[-1] if lines else f"it ended with {self.process.wait()}")
        return line

    def round(self, rows: int, n: int) -> tuple[float, float]:
        """Seconds to the first token, and to the last."""
        return self.run(rows, 1), self.run(rows, n)

    def run(self, rows: int, n: int) -> float:
        print(rows, n, file=self.process.stdin, flush=True)
        return float(self.read())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def bandwidth() -> float:
    """Memory read bandwidth of two threads, in bytes per second."""
    import torch

    torch.set_num_threads(2)
    block = torch.ones(2**27)  # 512 MB
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - begin)
    return block.nbytes / min(times)


def weights_read(folder: Path) -> int:
    """Number of weights that a step reads: all matrices except embeddings, unless they are also the head."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    looked_up = ["wpe", "embed_tokens", "wte"] if "lm_head.weight" in sizes else ["wpe"]
    matrices = {name: shape for name, shape in sizes.items() if len(shape) == 2}
    return sum(a * b for name, (a, b) in matrices.items() if not any(part in name for part in looked_up))


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per second, side by side")
    parser.add_argument("--model", default="gpt2", help="a published size (random weights) or a folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128, help="new tokens of a round")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these programs")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--llama-cpp", help="llama.cpp's sources, built in their folder build")
    parser.add_argument("--llama-cpp-build", default="build", metavar="NAME", help="another folder it was built in")
    parser.add_argument("--python", nargs="+", metavar="NAME=PATH", default=[], help="the python to run a program with")
    parser.add_argument("--tokenizer", type=Path, help="a folder with the tokenizer to save with random weights")
    options = parser.parse_args()
    if options.nanogpt:
        os.environ["NANOGPT"] = options.nanogpt
    with tempfile.TemporaryDirectory() as place:
        folder = Path(options.model)
        if not folder.exists():
            folder = make_model_folder(options.model, Path(place) / options.model, options.tokenizer)
        compare(folder, options)


def make_model_folder(size: str, folder: Path, tokenizer_folder: Path | None) -> Path:
    """Save a model of this size with random weights, and a tokenizer, which some peers need (with made-up words unless
    its folder is given). The last token, GPT-2's eos, gets an embedding of zeros, so that it is never predicted.
    """
    import heedful
    from heedful.text import words

    model = heedful.create(size)
    model.get_parameter("embed.weight").data[-1] = 0.0
    if tokenizer_folder is None:
        tokenizer = words([" ".join(f"w{i}" for i in range(model.config.vocab_size - 4))])
    else:
        tokenizer = heedful.Tokenizer.from_folder(tokenizer_folder)
    heedful.save(model, folder, tokenizer)
    return folder


def compare(folder: Path, options: argparse.Namespace) -> None:
    pythons = dict(pair.split("=", 1) for pair in options.python)
    read, speed = weights_read(folder), bandwidth()
    print(f"{read / 1e6:.0f}M weights per step; memory gives {speed / 1e9:.1f} GB/s\n", flush=True)
    workers: dict[tuple[str, str], Worker | LlamaCpp] = {}
    failed: dict[tuple[str, str], str] = {}
    for name, precision in CONTENDERS:
        if (options.only and name not in options.only) or precision not in options.precision:
            continue
        try:
            if name == "llama.cpp":
                workers[name, precision] = LlamaCpp(precision, folder, options.llama_cpp, options.llama_cpp_build)
            else:
                python = pythons.get(name, sys.executable)
                workers[name, precision] = Worker(name, precision, folder, python)
        except PROBLEMS as problem:
            failed[name, precision] = str(problem)
    rounds: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for turn in range(options.rounds + 1):  # the first is a warm-up
        print(f"round {turn} of {options.rounds}", file=sys.stderr)
        for (name, precision), worker in workers.items():
            for rows in options.batch:
                if (name, precision) in failed:
                    break
                try:
                    took = worker.round(rows, NEW_TOKENS.get(name, options.new))
                except PROBLEMS as problem:
                    failed[name, precision] = str(problem)
                    break
                if turn:
                    rounds.setdefault((name, precision, rows), []).append(took)
    for worker in workers.values():
        if isinstance(worker, Worker):
            worker.close()
    print_table(rounds, {p: speed / (read * BYTES[p]) for p in BYTES}, options)
    for (name, precision), reason in failed.items():
        print(f"\n{name} {precision}: not measured ({reason})")


def print_table(
    rounds: dict[tuple[str, str, int], list[tuple[float, float]]],
    limits: dict[str, float],
    options: argparse.Namespace,
) -> None:
    """Print medians, and the least and greatest, as a markdown table; "x transformers" is the speedup over transformers
    at the same precision."""
    rates, prefill_rates, spread = {}, {}, {}
    for key, pairs in rounds.items():
        name, _, rows = key
        new = NEW_TOKENS.get(name, options.new)
        each = [rows * (new - 1) / (b - a) for a, b in pairs]
        rates[key], spread[key] = statistics.median(each), f"{min(each):.0f} to {max(each):.0f}"
        prefill_rates[key] = rows * PROMPT / statistics.median(a for a, _ in pairs)
    heads = [f"batch {rows}: tokens/s | x transformers | prompt tokens/s" for rows in options.batch]
    print(f"| program | precision | {' | '.join(heads)} | limit at batch 1 | of the limit |")
    print(f"|---|---|{'---|---|---|' * len(options.batch)}---|---|")
    for name, precision in dict.fromkeys(key[:2] for key in rounds):
        cells = []
        for rows in options.batch:
            rate = rates[name, precision, rows]
            base = rates.get(("transformers", precision, rows))
            cells.append(f"{rate:.0f} ({spread[name, precision, rows]}) | " + (f"{rate / base:.2f}" if base else ""))
            cells.append(f"{prefill_rates[name, precision, rows]:.0f}")
        limit, single = limits[precision], rates.get((name, precision, 1))
        cells += [f"{limit:.0f}", f"{single / limit:.0%}" if single else ""]
        print(f"| {name} | {precision} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
