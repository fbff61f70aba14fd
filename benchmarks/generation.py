"""Generation, side by side: tokens per second of heedful and its peers on the same shapes, in one run.

    python benchmarks/generation.py [--model gpt2 | FOLDER] [--batch 1 8] [--rounds 5] [--only NAME ...]
        [--tokenizer FOLDER] [--nanogpt FOLDER] [--llama-cpp FOLDER]

GPT-2 124M's shape with random weights unless a folder in the hub's layout is given. Each program runs in a process of
its own, loads once, and is asked for a round when its turn comes, so that all see the same machine (llama.cpp's own
benchmark program is started for each round). A round is a prompt of 128 tokens and 128 new ones, greedy; the speed of
decoding is what remains when the time of the first token is taken off. What is not installed is listed with the
reason. llama.cpp converts only models whose vocabulary it knows: --tokenizer names a folder with GPT-2's own.

The limit is bandwidth: the bytes of the weights that a step must read, over what this machine reads from memory
(measured first). No program that reads all weights for each token can be faster at batch 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, NEW = 128, 128
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}

Speak = Callable[[int, int], object]  # rows, new tokens


# --- contenders: each loads its model and returns a function that writes n tokens for each of so many rows -----------


def heedful_worker(folder: str, precision: str) -> Speak:
    import torch

    import heedful
    from heedful.generate.engine import greedy
    from heedful.models.base import Batch

    loaded = heedful.load(folder, quantize=precision)

    def speak(rows: int, n: int) -> object:
        prompt = torch.randint(5, 5000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
        return greedy(loaded.model, Batch(prompt), n)

    return speak


def transformers_worker(folder: str, precision: str) -> Speak:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()

    def speak(rows: int, n: int) -> object:
        prompt = torch.randint(5, 5000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(prompt)
        with torch.inference_mode():
            return model.generate(
                prompt,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=n,
                max_new_tokens=n,
                pad_token_id=0,
            )

    return speak


def ctranslate2_worker(folder: str, precision: str) -> Speak:
    import ctranslate2

    place = Path(folder) / f"ctranslate2-{precision}"
    if not place.exists():
        converter = ctranslate2.converters.TransformersConverter(folder)
        converter.convert(str(place), quantization=None if precision == "float32" else precision)
    model = ctranslate2.Generator(str(place), device="cpu", intra_threads=2, compute_type=precision)
    words = json.loads((place / "vocabulary.json").read_text())

    def speak(rows: int, n: int) -> object:
        prompt = [[words[5 + (7 * i + 13 * r) % 5000] for i in range(PROMPT)] for r in range(rows)]
        return model.generate_batch(
            prompt, max_length=n, min_length=n, sampling_topk=1, include_prompt_in_result=False, end_token=[]
        )

    return speak


def nanogpt_worker(folder: str, precision: str) -> Speak:
    import torch

    sys.path.insert(0, os.environ["NANOGPT"])
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(dropout=0.0)).eval().to(getattr(torch, precision))

    def speak(rows: int, n: int) -> object:  # it has no cache: few tokens say it all
        prompt = torch.randint(5, 5000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
        return model.generate(prompt, n, top_k=1)

    return speak


WORKERS = {
    "heedful": heedful_worker,
    "transformers": transformers_worker,
    "ctranslate2": ctranslate2_worker,
    "nanogpt": nanogpt_worker,
}
CONTENDERS = [
    ("heedful", "float32"), ("transformers", "float32"), ("ctranslate2", "float32"), ("nanogpt", "float32"),
    ("llama.cpp", "float32"),
    ("heedful", "bfloat16"), ("transformers", "bfloat16"), ("llama.cpp", "bfloat16"),
    ("heedful", "int8"), ("ctranslate2", "int8"), ("llama.cpp", "int8"), ("heedful", "int4"),
]  # fmt: skip


def work(name: str, precision: str, folder: str) -> None:
    """In the worker's process: load, then answer each line "rows n" with the seconds it took."""
    import torch

    torch.set_num_threads(2)
    speak = WORKERS[name](folder, precision)
    print("ready", flush=True)
    for line in sys.stdin:
        rows, n = map(int, line.split())
        begin = time.perf_counter()
        speak(rows, n)
        print(time.perf_counter() - begin, flush=True)


# --- the run ---------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """llama.cpp through its own batched benchmark; it says itself how long prompt and answer took."""

    KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "q8_0"}  # noqa: RUF012

    def __init__(self, precision: str, folder: Path, sources: Path) -> None:
        self.program = sources / "build" / "bin" / "llama-batched-bench"
        self.file = folder / f"llama-{self.KINDS[precision]}.gguf"
        convert = [sys.executable, str(sources / "convert_hf_to_gguf.py"), str(folder)]
        convert += ["--outtype", self.KINDS[precision], "--outfile", str(self.file)]
        done = subprocess.run(convert, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])

    def round(self, rows: int, n: int) -> tuple[float, float]:
        command = [str(self.program), "-m", str(self.file), "-t", "2", "-tb", "2", "-c", str(4096)]
        command += ["-npp", str(PROMPT), "-ntg", str(n), "-npl", str(rows), "--output-format", "jsonl"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        return row["t_pp"], row["t_pp"] + row["t_tg"]


class Worker:
    def __init__(self, name: str, precision: str, folder: Path) -> None:
        command = [sys.executable, __file__, "--worker", name, precision, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdin and self.process.stdout
        self.read = self.process.stdout.readline
        if self.read().strip() != "ready":
            assert self.process.stderr
            lines = self.process.stderr.read().strip().splitlines() or ["it ended"]
            raise RuntimeError(lines[-1])

    def round(self, rows: int, n: int) -> tuple[float, float]:
        """Seconds to the first token, and for all of them."""
        return self.ask(rows, 1), self.ask(rows, n)

    def ask(self, rows: int, n: int) -> float:
        assert self.process.stdin
        print(rows, n, file=self.process.stdin, flush=True)
        return float(self.read())


def bandwidth() -> float:
    """Bytes per second that two threads read from memory."""
    import torch

    torch.set_num_threads(2)
    block = torch.ones(2**27)  # 512 MB
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - begin)
    return block.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per second, side by side")
    parser.add_argument("--model", default="gpt2", help="a published size (random weights) or a folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these programs")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--llama-cpp", help="llama.cpp's sources, built in their folder build")
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with the tokenizer to save with random weights"
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    if options.nanogpt:
        os.environ["NANOGPT"] = options.nanogpt
    with tempfile.TemporaryDirectory() as place:
        folder = Path(options.model)
        if not folder.exists():
            folder = make(options.model, Path(place) / options.model, options.tokenizer)
        compare(folder, options)


def make(size: str, folder: Path, tokenizer_folder: Path | None) -> Path:
    """A folder of this size with random weights, and a vocabulary (of made-up words): some peers ask for one."""
    import heedful
    from heedful.text import words

    model = heedful.create(size)
    if tokenizer_folder is None:
        tokenizer = words([" ".join(f"w{i}" for i in range(model.config.vocab_size - 4))])
    else:
        tokenizer = heedful.Tokenizer.from_folder(tokenizer_folder)
    heedful.save(model, folder, tokenizer)
    return folder


def compare(folder: Path, options: argparse.Namespace) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    read = sum(
        int.__mul__(*shape) for name, shape in sizes.items() if len(shape) == 2 and "wpe" not in name
    )  # all matrices, positions aside
    speed = bandwidth()
    print(f"{read / 1e6:.0f}M weights per step; memory gives {speed / 1e9:.1f} GB/s\n")
    workers: dict[tuple[str, str], Worker | LlamaCpp] = {}
    for name, precision in CONTENDERS:
        if options.only and name not in options.only:
            continue
        try:
            if name == "llama.cpp":
                if not options.llama_cpp:
                    raise RuntimeError("no --llama-cpp")
                workers[name, precision] = LlamaCpp(precision, folder, Path(options.llama_cpp))
            else:
                workers[name, precision] = Worker(name, precision, folder)
        except (RuntimeError, ValueError) as problem:
            print(f"{name} {precision}: not measured ({problem})")
    rounds: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    new = {"nanogpt": 8}
    for turn in range(options.rounds + 1):  # the first warms up
        for (name, precision), worker in workers.items():
            for rows in options.batch:
                took = worker.round(rows, new.get(name, NEW))
                if turn:
                    rounds.setdefault((name, precision, rows), []).append(took)
    heads = " | ".join(f"batch {b}: tokens/s | first token s" for b in options.batch)
    print(
        f"| program | precision | {heads} | limit at batch 1 |\n|---|---|{'---|---|' * len(options.batch)}---|"
    )
    for name, precision in workers:
        cells = []
        for rows in options.batch:
            pairs = rounds[name, precision, rows]
            n = new.get(name, NEW)
            rate = statistics.median(rows * (n - 1) / (b - a) for a, b in pairs)
            cells.append(f"{rate:.0f} | {statistics.median(a for a, _ in pairs):.3f}")
        limit = speed / (read * BYTES[precision])
        print(f"| {name} | {precision} | {' | '.join(cells)} | {limit:.0f} |")


if __name__ == "__main__":
    main()
