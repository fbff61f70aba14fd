"""Training GPT-2 124M on a GPU: tokens per second of heedful's Trainer and nanoGPT.

    python benchmarks/training_gpu.py --nanogpt FOLDER [--batch 32] [--rounds 4] [--steps 10]

Both: 1,024 tokens a row, bfloat16 autocast, torch.compile, fused AdamW, gradients clipped at 1, no dropout, no
evaluation. nanoGPT runs as in its train.py (no biases, vocabulary padded to 50,304), and once more with GPT-2's biases,
which heedful's model has; heedful has GPT-2's vocabulary of 50,257. Tokens are random, which does not affect the time.
Each runs in its own process, one after the other; medians of the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

LENGTH, VOCABULARY = 1024, 50257
NAMES = ("nanogpt", "nanogpt-biases", "heedful")


def nanogpt(folder: str, batch: int, biases: bool) -> Callable[[int], None]:
    import torch

    sys.path.insert(0, folder)
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(LENGTH, 50304, 12, 12, 768, dropout=0.0, bias=biases)).cuda()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    called = torch.compile(model)
    rows = torch.randint(0, VOCABULARY, (batch, LENGTH + 1)).pin_memory()

    def train(n: int) -> None:
        for _ in range(n):
            x, y = (t.contiguous().pin_memory().cuda(non_blocking=True) for t in (rows[:, :-1], rows[:, 1:]))
            with torch.autocast("cuda", torch.bfloat16):
                loss = called(x, y)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return train


def heedful(batch: int) -> Callable[[int], None]:
    import numpy as np

    from heedful import create
    from heedful.data.corpus import Corpus, TokenWindows
    from heedful.train.objectives import causal
    from heedful.train.recipe import Recipe
    from heedful.train.trainer import Trainer

    recipe = Recipe.from_dict(
        {
            "train": {
                "batch_size": batch,
                "steps": 10**6,
                "eval_every": 10**6,
                "precision": "bfloat16",
                "device": "cuda",
            },
            "optimizer": {"lr": 6e-4, "betas": [0.9, 0.95]},
        }
    )
    data = TokenWindows(Corpus.of([np.random.default_rng(0).integers(0, VOCABULARY, 2**22)]), LENGTH)
    trainer = Trainer(create("gpt2", dropout=0.0), causal, data, None, recipe)

    def train(n: int) -> None:
        trainer.settings = dataclasses.replace(trainer.settings, steps=trainer.step + n, eval_every=10**6)
        trainer.train()

    return train


def measure(name: str, options: argparse.Namespace) -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    begin = time.perf_counter()
    train = heedful(options.batch) if name == "heedful" else nanogpt(options.nanogpt, options.batch, "biases" in name)
    train(4)
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    rounds = []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        train(options.steps)
        torch.cuda.synchronize()
        rounds.append(options.batch * LENGTH * options.steps / (time.perf_counter() - begin))
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"name": name, "rate": median(rounds), "ready": ready, "memory": memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", help="a folder with nanoGPT's model.py; needed unless --only leaves it out")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=NAMES, nargs="*", default=NAMES)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return measure(options.worker, options)
    print("program           tokens/s   GB   seconds to be ready")
    for name in options.only:
        command = [sys.executable, *sys.argv, "--worker", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:<16}  failed: {done.stderr.strip()[-1500:]}")
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{name:<16} {found['rate']:9,.0f} {found['memory']:5.1f} {found['ready']:6.0f}", flush=True)


if __name__ == "__main__":
    main()
