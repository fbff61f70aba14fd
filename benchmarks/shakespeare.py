"""End-to-end training time on a CPU, character-level Shakespeare: nanoGPT's 2,000 steps and heedful's recipe.

    python benchmarks/shakespeare.py TEXT --nanogpt FOLDER [--rounds 3] [--quality]

nanoGPT runs its train.py with its readme's settings for a CPU (4 layers, 4 heads, width 128, 64 characters, batches of
12, 0.80 million parameters) for 2,000 steps; its validation loss is its own estimate. heedful runs the recipe `qwen`
(0.19 million parameters; the same text and split) and evaluates once at the end, on the whole validation text. The time
is that of the whole command. "first step" is the time until the first step is logged, with cached data; the best of the
rounds.

With --quality: the recipe `shakespeare-quick`, with as many seeds as rounds, to the loss that nanoGPT's settings for a
GPU (10.65 million parameters, 64 rows of 256 characters) end with, and how long a step with those takes here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --log_interval=1 --block_size=64 --batch_size=12"
    " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 --eval_interval=2000"
).split()
NANOGPT_GPU = "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 --log_interval=1".split()
ONCE = ["--set", "train.eval_every=400", "--set", "log.samples=false"]


def timed(command: list[str], folder: Path, pattern: str, first: str = "", **environment: str) -> tuple[float, str]:
    """Seconds until the command ends, or until its output contains `first`; and the last match of the pattern."""
    begin, found = time.perf_counter(), ""
    process = subprocess.Popen(
        command,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(pattern, line):
            found = match[1]
        if first and first in line:
            process.kill()
            break
    process.wait()
    return time.perf_counter() - begin, found


def prepare(text: Path, nanogpt: Path) -> None:
    """Write the files of nanoGPT's prepare.py."""
    import pickle

    import numpy as np

    read = text.read_text()
    known = {c: i for i, c in enumerate(sorted(set(read)))}
    ids = np.array([known[c] for c in read], dtype=np.uint16)
    folder = nanogpt / "data" / "shakespeare_char"
    n = int(0.9 * len(ids))
    ids[:n].tofile(folder / "train.bin")
    ids[n:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(known)}))


def quality(text: Path, nanogpt: Path, rounds: int) -> None:
    """Time and loss of our recipe, and the time of one of nanoGPT's steps."""
    command = [sys.executable, "-m", "heedful", "train", "shakespeare-quick", "--set", f"data.source={text}"]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rounds):
            found = timed([*command, "--set", f"train.seed={seed}"], Path(folder), r"best validation loss +(\d+\.\d+)")
            print(f"heedful, seed {seed}: {found[0]:.0f} s to validation loss {found[1]}", flush=True)
    _, milliseconds = timed([sys.executable, "train.py", *NANOGPT_GPU, "--max_iters=5"], nanogpt, r"time (\d+\.\d+)ms")
    print(f"nanogpt: {float(milliseconds) / 1e3:.1f} s a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quality", action="store_true")
    options = parser.parse_args()
    text, nanogpt = options.text.resolve(), options.nanogpt.resolve()
    prepare(text, nanogpt)
    if options.quality:
        return quality(text, nanogpt, options.rounds)
    heedful = [sys.executable, "-m", "heedful", "train", "qwen", "--set", f"data.source={text}"]
    theirs = [sys.executable, "train.py", *NANOGPT]
    starts: dict[str, list[float]] = {"nanogpt": [], "heedful": []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        timed([*heedful, *ONCE], place, "()", first="step 1/")  # fills the cache
        for _ in range(options.rounds):
            starts["nanogpt"].append(timed([*theirs, "--eval_iters=1"], nanogpt, "()", first="iter 0:")[0])
            starts["heedful"].append(timed([*heedful, *ONCE], place, "()", first="step 1/")[0])
        print(
            f"first step: nanogpt {min(starts['nanogpt']):.2f} s, heedful {min(starts['heedful']):.2f} s",
            flush=True,
        )
        for _ in range(options.rounds):
            ours = timed([*heedful, *ONCE], place, r"validation loss (\d+\.\d+)")
            print(f"heedful: {ours[0]:.1f} s to validation loss {ours[1]}", flush=True)
        done = timed([*theirs, "--eval_iters=20"], nanogpt, r"val loss (\d+\.\d+)")
        print(f"nanogpt: {done[0]:.1f} s to validation loss {done[1]}")


if __name__ == "__main__":
    main()
