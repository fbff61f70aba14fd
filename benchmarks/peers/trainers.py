"""The programs that benchmarks/training.py compares: each makes its model and returns a function that trains n steps.

The model is nanoGPT's for a CPU: 4 layers, 4 heads, 128 wide, 64 positions, dropout only if asked for, a vocabulary of
characters, in batches of 12; AdamW, gradients clipped at 1. The loops of nanoGPT and minGPT are their own (train.py,
trainer.py) without evaluation and printing; that of transformers is nanoGPT's. heedful's is its Trainer.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

LENGTH, BATCH, WIDTH, LAYERS, HEADS = 64, 12, 128, 4, 4
LR, BETAS, DECAY = 1e-3, (0.9, 0.99), 0.1
Train = Callable[[int], object]  # steps


def characters(text: str) -> tuple[Any, int]:
    """The first nine tenths of a text as numbers, and how many characters there are."""
    import numpy as np

    known = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = np.array([known[c] for c in text], dtype=np.uint16)
    return ids[: len(ids) * 9 // 10], len(known)


def nanogpt_batches(ids: Any) -> Iterator[tuple[Any, Any]]:
    """train.py's get_batch."""
    import numpy as np
    import torch

    while True:
        places = torch.randint(len(ids) - LENGTH, (BATCH,))
        x = torch.stack([torch.from_numpy(ids[i : i + LENGTH].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(ids[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places])
        yield x, y


def heedful(text: Path, folder: str, precision: str, compiled: bool, dropout: float) -> Train:
    from heedful.recipes.build import build_training
    from heedful.train.recipe import Recipe
    from heedful.train.trainer import Trainer

    recipe = Recipe.from_dict(
        {
            "model": {
                "family": "gpt", "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_len": LENGTH,
                "dropout": dropout,
            },
            "tokenizer": {"kind": "characters"},
            "data": {"source": str(text), "length": LENGTH},
            "train": {
                "batch_size": BATCH, "steps": 1000000, "eval_every": 1000000, "precision": precision,
                "compile": "yes" if compiled else "no",
            },
            "optimizer": {"name": "adamw", "lr": LR, "betas": list(BETAS), "weight_decay": DECAY},
        }
    )  # fmt: skip
    ready = build_training(recipe)
    trainer = Trainer(ready.model, ready.objective, ready.train, None, ready.recipe)

    def train(n: int) -> None:
        trainer.settings = dataclasses.replace(trainer.settings, steps=trainer.step + n)
        trainer.train()

    return train


def loop(
    model: Any, parameters: list[Any], optimizer: Any, batches: Any, loss_of: Callable[..., Any], context: Any
) -> Train:
    """nanoGPT's: the next batch is made between forward and backward."""
    import torch

    batch = next(batches)

    def train(n: int) -> None:
        nonlocal batch
        for _ in range(n):
            for group in optimizer.param_groups:
                group["lr"] = LR
            with context:
                loss = loss_of(model, *batch)
            batch = next(batches)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return train


def mixed(precision: str) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext()


def nanogpt(text: Path, folder: str, precision: str, compiled: bool, dropout: float) -> Train:
    import torch

    sys.path.insert(0, folder)
    from model import GPT, GPTConfig

    ids, n = characters(text.read_text())
    model = GPT(GPTConfig(LENGTH, n, LAYERS, HEADS, WIDTH, dropout=dropout, bias=False))
    optimizer = model.configure_optimizers(DECAY, LR, BETAS, "cpu")
    called = torch.compile(model) if compiled else model
    loss_of = lambda model, x, y: model(x, y)[1]  # noqa: E731
    return loop(called, list(model.parameters()), optimizer, nanogpt_batches(ids), loss_of, mixed(precision))


def transformers(text: Path, folder: str, precision: str, compiled: bool, dropout: float) -> Train:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    ids, n = characters(text.read_text())
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=n, **sizes, **dropouts)).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LR, BETAS)
    called = torch.compile(model) if compiled else model
    loss_of = lambda model, x, y: model(input_ids=x, labels=x).loss  # noqa: E731
    return loop(called, parameters, optimizer, nanogpt_batches(ids), loss_of, mixed(precision))


def mingpt(text: Path, folder: str, precision: str, compiled: bool, dropout: float) -> Train:
    """trainer.py's loop, with batches from its kind of loader; no workers, which two cores have no room for."""
    import torch

    sys.path.insert(0, folder)
    from mingpt.model import GPT
    from mingpt.trainer import Trainer

    ids, n = characters(text.read_text())
    rows = torch.from_numpy(ids.astype("int64")).unfold(0, LENGTH + 1, 1)
    examples = torch.utils.data.TensorDataset(rows)
    chosen = torch.utils.data.RandomSampler(examples, replacement=True, num_samples=10**7)
    batches = iter(torch.utils.data.DataLoader(examples, BATCH, sampler=chosen))
    config = GPT.get_default_config()
    config.model_type, config.n_layer, config.n_head, config.n_embd = None, LAYERS, HEADS, WIDTH
    config.vocab_size, config.block_size = n, LENGTH
    config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = dropout
    model = GPT(config)
    settings = Trainer.get_default_config()
    settings.learning_rate, settings.betas, settings.weight_decay = LR, BETAS, DECAY
    optimizer = model.configure_optimizers(settings)
    called = torch.compile(model) if compiled else model
    context = mixed(precision)

    def train(n: int) -> None:
        for _ in range(n):
            (row,) = next(batches)
            with context:
                _, loss = called(row[:, :-1].contiguous(), row[:, 1:].contiguous())
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_norm_clip)
            optimizer.step()

    return train


PROGRAMS = {"heedful": heedful, "nanogpt": nanogpt, "mingpt": mingpt, "transformers": transformers}


def main() -> None:
    """Reads how many steps to train, answers with the seconds each took, until there is nothing more to read."""
    name, text, folder, precision, compiled, dropout, threads = sys.argv[1:]
    import torch

    torch.set_num_threads(int(threads))
    torch.manual_seed(1)
    said, sys.stdout = sys.stdout, sys.stderr  # what a program prints is no answer
    train = PROGRAMS[name](Path(text), folder, precision, compiled == "yes", float(dropout))
    train(5)
    print("ready", file=said, flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        train(int(line))
        print((time.perf_counter() - begin) / int(line), file=said, flush=True)


if __name__ == "__main__":
    main()
