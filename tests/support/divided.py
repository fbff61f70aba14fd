"""What each process of tests/kernels/test_tensor_parallel.py does with the models that it has a part of."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.cli import main
from heedful.generate.engine import Engine
from heedful.generate.leader import LeadingEngine, end_followers, follow
from heedful.generate.request import Request, Sampling
from heedful.models.base import Batch, DecoderModel, GenerativeModel
from heedful.train.distributed import Processes

N_PREFIX = 3  # tokens of the prompt before a step


@torch.no_grad()
def logits(model: GenerativeModel[Any], batch: Batch) -> dict[str, torch.Tensor]:
    """Of all tokens, and of a decoder of one more token after a cached prefix."""
    found = {"logits": model(batch).logits}
    if isinstance(model, DecoderModel):
        _, state = model.start(batch.ids[:, :N_PREFIX])
        found["step"] = model.step(batch.ids[:, N_PREFIX], state)
    return found


def generated(model: GenerativeModel[Any], batch: Batch, state: str, **sampling: Any) -> list[list[int]]:
    """Eight ids after each row, of which all are in one batch."""
    rows = batch.ids if batch.source is None else batch.source
    given = [tuple(row[: 2 + 2 * i].tolist()) for i, row in enumerate(rows)]
    requests = [
        Request(*((ids,) if batch.source is None else ((), ids)), max_tokens=8, sampling=Sampling(**sampling))
        for ids in given
    ]
    return [result.choices[0].tokens for result in Engine(model, state=state).run(requests)]


def compute(processes: Processes, folder: Path) -> dict[str, Any]:
    """A job: the logits of every model in the folder `models`, and what those in `engine.json` generate."""
    with_engine, ids = json.loads((folder / "engine.json").read_text()), {}
    for path in sorted((folder / "models").iterdir()):
        model = heedful.load(path, device="cpu", tensor_parallel=True).model
        batch = Batch(**load_file(path / "batch.safetensors"))
        found = logits(model, batch)
        if processes.main:
            save_file({name: x.contiguous() for name, x in found.items()}, folder / f"{path.name}.safetensors")
        for state in with_engine.get(path.name, ()):
            ids[f"{path.name}, {state}"] = generated(model, batch, state, temperature=0)
    return ids


def own_part(processes: Processes, folder: Path) -> dict[str, Any]:
    """A job: what each process has of a LLaMA, and what it samples without a seed."""
    model = heedful.load(folder / "models" / "llama2", device="cpu", tensor_parallel=True).model
    batch = Batch(**load_file(folder / "models" / "llama2" / "batch.safetensors"))
    _, state = model.start(batch.ids)
    n_numbers = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    found = {
        "numbers": n_numbers,
        "cached heads": state.caches[0].keys.shape[1],
        "sampled": generated(model, batch, "contiguous", temperature=2.0),
        "abilities": model.abilities,
    }
    return [json.loads(text) for text in processes.gather_texts(json.dumps(found))]


def led(processes: Processes, folder: Path) -> list[list[int]] | None:
    """A job: the first process adds and cancels requests, as a server does; the other follows."""
    model = heedful.load(folder / "models" / "llama3", device="cpu", tensor_parallel=True).model
    if not processes.main:
        return follow(model)
    engine = LeadingEngine(model, state="paged", step_time=0.5)
    cancelled = engine.add(Request((5, 6), max_tokens=30))
    greedy = engine.add(Request((1, 2, 3), max_tokens=8, sampling=Sampling(temperature=0)))
    random = engine.add(Request((4, 5), max_tokens=8, sampling=Sampling(temperature=2.0)))
    results, n_steps = {}, 0
    while engine.busy:
        results |= {event.id: event.result.choices[0].tokens for event in engine.step() if event.result is not None}
        n_steps += 1
        if n_steps == 3:
            engine.cancel(cancelled)
    end_followers()
    return [results[greedy], results[random]]


def command(processes: Processes, folder: Path) -> list[str]:
    """A job: what each process prints for `heedful generate`."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(Processes, "start", lambda device: nullcontext(processes))
        main(["generate", "tiny-books", "The king", "--tensor-parallel", "--temperature", "0", "--max-tokens", "8"])
    return processes.gather_texts(printed.getvalue())
