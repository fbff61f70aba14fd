"""Models, generation, tasks and training on the emulated device, each compared with the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch

import heedful
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.loaded import Loaded
from heedful.models.base import Batch, GenerativeModel, Model
from heedful.train.distributed import Processes
from heedful.train.objectives import causal
from heedful.train.recipe import Recipe
from heedful.train.trainer import Trainer
from support.tiny import tiny
from support.together import Lines

# Families with parts of their own. The packed sequences of recurrent ones are half on the CPU, which is not emulated.
NAMES = ("gpt", "llama", "mixtral", "transformer", "t5", "bert")


def moved(model: Model, device: torch.device) -> Model:
    """A copy on the device."""
    there = copy.deepcopy(model).to(device)
    there.tie()  # wrapped tensors are moved one by one
    return there


def batch_of(model: Model, device: torch.device) -> Batch:
    draw = torch.Generator().manual_seed(0)
    tokens, lengths = torch.randint(3, 60, (3, 9), generator=draw).to(device), torch.tensor([9, 5, 7]).to(device)
    if "translate" in model.abilities:
        return Batch(tokens, source=tokens.flip(1), source_lengths=lengths)
    return Batch(tokens, lengths=lengths)


def generated(model: GenerativeModel[Any], **sampling: Any) -> list[list[int]]:
    source = (5, 6, 7, 8) if "translate" in model.abilities else None
    prompts = ((4, 9, 11), (7, 3)) if source is None else ((), ())
    requests = [Request(tokens, source, max_tokens=6, sampling=Sampling(**sampling)) for tokens in prompts]
    return [result.choices[0].tokens for result in Engine(model, None).run(requests)]


def check_family(name: str, device: torch.device) -> None:
    """Logits, gradients, greedy and sampled tokens."""
    model = tiny(name).eval()
    there = moved(model, device)
    logits = [one(batch_of(one, place)).logits for one, place in ((model, torch.device("cpu")), (there, device))]
    for found in logits:
        found.square().mean().backward()
    torch.testing.assert_close(logits[1].cpu(), logits[0], rtol=1e-4, atol=1e-4)
    for (at, ours), theirs in zip(there.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4, msg=f"{name}: {at}")
    if isinstance(model, GenerativeModel):
        for sampling in ({"temperature": 0}, {"seed": 1, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}):
            assert generated(there, **sampling) == generated(model, **sampling), (name, sampling)


def check_tasks(device: torch.device) -> None:
    """What shipped models do for their users."""

    def draft(loaded: Loaded) -> str:
        return loaded.generate("My lord, my lord", max_tokens=6, seed=3, draft="lookup")

    cases: list[tuple[str, Any]] = [
        ("bert-books", lambda loaded: loaded.embed(["a house", "my lord, what news?"]).cpu()),
        ("translator", lambda loaded: loaded.translate("a man is walking", max_tokens=12)),
        ("shakespeare", draft),
        ("digits-gpt", lambda loaded: loaded.complete_image(torch.full((1, 4, 8), -1.0), seed=1).cpu()),
    ]
    for name, run in cases:
        here = heedful.load(name, dtype=torch.float32)
        there = Loaded(moved(here.model, device), here.tokenizer, here.name)
        there.pooling = here.pooling
        found, expected = run(there), run(here)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=name)
        else:
            assert str(found) == str(expected), name


class OnDevice(Processes):
    """A process whose model keeps its tied weights when it is moved."""

    def wrap(self, module: Any, *, sharded: bool, bfloat16: bool = False) -> Any:
        module.to(self.device)
        module.model.tie()
        return module


def trained(device: torch.device, optimizer: str) -> list[float]:
    torch.manual_seed(0)
    model = tiny("gpt", dropout=0.0)  # masks are drawn otherwise on each device
    model.init_weights()
    tables = {
        "train": {"steps": 4, "batch_size": 8, "accumulate": 2, "workers": 0, "eval_every": 4, "ema": 0.9},
        "optimizer": {"name": optimizer, "lr": 0.01},
    }
    data = Lines(50, "gpt")
    trainer = Trainer(model, causal, data, data, Recipe.from_dict(tables), processes=OnDevice(device))
    best = trainer.train().best
    tensors, numbers = trainer.state()
    trainer.restore({name: t.detach().cpu() for name, t in tensors.items()}, numbers)
    return [best, *(float(p.detach().cpu().norm()) for p in model.parameters())]


def check_training(device: torch.device) -> None:
    """Losses and weights after a few steps; the state can be saved and restored."""
    for optimizer in ("adamw", "muon"):
        here, there = trained(torch.device("cpu"), optimizer), trained(device, optimizer)
        torch.testing.assert_close(torch.tensor(there), torch.tensor(here), rtol=1e-3, atol=1e-4, msg=optimizer)


def main(device: torch.device) -> None:
    """Every check."""
    for name in NAMES:
        check_family(name, device)
    check_tasks(device)
    check_training(device)
