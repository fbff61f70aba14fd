"""Trainings that one process or several do together, for tests/train/test_distributed.py.

Each job is a training; what the main process measured is written as FOLDER/NAME.json, its run as FOLDER/NAME.
`launch` starts the processes as torchrun would, but all from one that has imported everything already
(also what PyTorch imports late: _dynamo with the first step of an optimizer).
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp

from heedful.models.base import Batch
from heedful.train.diagnostics import TrainingDiverged
from heedful.train.distributed import Processes
from heedful.train.objectives import Loss, causal, masked, seq2seq
from heedful.train.recipe import Recipe
from heedful.train.run import Run, to_toml
from heedful.train.runlog import RunLog
from heedful.train.trainer import Trainer
from support.tiny import tiny

V = 61
OBJECTIVES = {"bert": masked, "t5": seq2seq, "seq2seq": seq2seq}


class Lines:
    """Counting upwards from anywhere in steps of 1, 2 or 3: lines of 3 to 12 tokens, which can be learned."""

    fingerprint = "lines"

    def __init__(self, n: int, family: str) -> None:
        self.n, self.family = n, family
        self.lengths = np.array([3 + 5 * i % 10 for i in range(n)])

    def __len__(self) -> int:
        return self.n

    def batch(self, draws, seed):
        rows = [self._row(draw.index) for draw in draws]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if self.family not in OBJECTIVES:
            return Batch(tokens, lengths)
        real = torch.arange(tokens.shape[1]) < lengths[:, None]
        targets = tokens.masked_fill(~real, -100)
        if self.family == "bert":  # every third is hidden
            hidden = torch.arange(tokens.shape[1]) % 3 == 1
            return Batch(tokens.masked_fill(hidden, 0), lengths, targets=targets.masked_fill(~hidden, -100))
        return Batch(tokens.roll(1, 1), lengths, source=tokens, source_lengths=lengths, targets=targets)

    def _row(self, index: int) -> torch.Tensor:
        return (index * 7 + torch.arange(self.lengths[index]) * (1 + index % 3)) % (V - 1) + 1


class Curve(RunLog):
    """A log that keeps the numbers. At the step that a job says something happens to the second process."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        settings = recipe(job)
        super().__init__(None, steps=settings.train.steps, settings=settings.log, quiet=True)
        happens = ("killed_at", "fails_at", "stopped_at") if rank == 1 else ()
        self.trouble = {job.get(what): what for what in happens}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.judged: list[float] = []
        self.samples: list[str] = []

    def step(self, step: int, loss: float, *, norm: float, **more: Any) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        match self.trouble.get(step):
            case "killed_at":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fails_at":
                raise ValueError("the milk is sour: buy some")
            case "stopped_at":  # as Ctrl-C under torchrun: from the terminal, and once more from torchrun
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    def validation(self, step: int, loss: float, metrics: Any) -> None:
        self.judged.append(loss)

    def sample(self, step: int, text: str) -> None:
        self.samples.append(text)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def recipe(job: dict[str, Any]) -> Recipe:
    train = {"steps": 4, "batch_size": 6, "eval_every": 2, "workers": 0, "device": "cpu", "compile": "no"}
    return Recipe.from_dict(
        {
            "train": {**train, **job.get("train", {})},
            "optimizer": {"lr": 0.01, **job.get("optimizer", {})},
            "schedule": {"warmup": 1},
        }
    )


def fresh(job: dict[str, Any]):
    torch.manual_seed(0)
    family = job.get("family", "gpt")
    model = tiny(family, **job.get("model", {}))
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
        elif isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.init_weights()
    for name, parameter in model.named_parameters():
        if any(part in name for part in job.get("frozen", [])):
            parameter.requires_grad = False
    return model


def scores(model, step: int) -> str:
    """Something that a model says, by calls of its parts that no objective makes."""
    model.eval()
    with torch.no_grad():
        logits, _ = model.start(Batch(torch.tensor([[5, 6, 7]], device=model.device)))
    return f"{logits.double().abs().sum():.4f}"


def digest(model, tensors) -> str:
    """Of every bit of the weights and of the optimizer's state."""
    found = hashlib.blake2b()
    for name, tensor in sorted({**dict(model.named_parameters()), **tensors}.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def spoiled(kind: str, rank: int):
    """An objective that has no finite loss, or no finite gradient, for the second process's batches."""

    def objective(model, batch):
        loss = causal(model, batch)
        if rank != 1:
            return loss
        if kind == "loss":
            return Loss(loss.sum * torch.nan, loss.n_targets)
        return Loss(loss.sum + (model.decoder.norm.weight.sum() * 0).sqrt(), loss.n_targets)  # 0 / 0 backwards

    return objective


def train(job: dict[str, Any], processes: Processes, folder: Path) -> dict[str, Any]:
    """Train as a job says; `run`: in a run's folder, where it goes on if there is a checkpoint."""
    settings, family = recipe(job), job.get("family", "gpt")
    model, log = fresh(job), Curve(job, processes.rank)
    measured: dict[str, Any] = {"saved": {}}
    run = None
    if job.get("run") and processes.main:
        run = Run.open(folder) if folder.exists() else Run.create(folder, to_toml(settings.to_dict()), {})

    def save(trainer: Trainer, better: bool) -> None:
        tensors, numbers = trainer.state()
        with processes.gathered(trainer.model, tensors) as whole:
            if run is not None:
                measured["saved"][trainer.step] = digest(trainer.model, whole)
                run.save(trainer.step, trainer.model, None, whole, numbers, best=better)

    trainer = Trainer(
        model,
        spoiled(job["spoiled"], processes.rank) if "spoiled" in job else OBJECTIVES.get(family, causal),
        Lines(23, family),
        Lines(7, family),
        settings,
        processes=processes,
        log=log,
        save=save if job.get("run") else None,
        sample=scores if job.get("sample") else None,
    )
    if job.get("run"):
        with processes.main_first():
            saved = Run.open(folder).newest(log.note)
        if saved is not None:
            saved.restore(model)
            trainer.restore(saved.tensors(), saved.numbers)
            assert trainer.ema is not None
            with trainer.ema.swapped(), processes.gathered(model, trainer.state()[0]) as whole:  # as it is saved
                measured["restored"] = digest(model, whole) if processes.main else ""
    try:
        measured["reason"] = trainer.train().reason
    except TrainingDiverged as halted:
        measured["reason"] = str(halted)
    measured |= {"losses": log.losses, "norms": log.norms, "judged": log.judged, "samples": log.samples}
    measured["tied"] = hasattr(model, "embed") and getattr(model.head, "weight", None) is model.embed.weight
    state = trainer.optimizer.state
    measured["idle"] = sum(not state.get(parameter) for parameter in trainer.parameters)
    return measured


def work(rank: int, world_size: int, port: int, folder: Path, jobs: dict[str, Any]) -> None:
    """One process: what it says goes to FOLDER/RANK.txt."""
    torch.set_num_threads(1)
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {key: str(value) for key, value in place.items()}
    sys.stderr = (folder / f"{rank}.txt").open("w")
    faulthandler.enable(sys.stderr)
    with Processes.start("cpu") as processes:
        for name, job in jobs.items():
            found = job(processes, folder) if callable(job) else train(job, processes, folder / name)
            if processes.main:
                (folder / f"{name}.json").write_text(json.dumps(found))


def launch(world_size: int, folder: Path, jobs: dict[str, Any]) -> tuple[dict[str, Any], list[int], str]:
    """What the jobs measured, how the processes ended, and what they said.

    Once in some 500 launches on a busy machine a process crashed (SIGSEGV), and never when it was looked for: such a
    launch is told of, with where it was, and repeated once.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as aside:
        before = shutil.copytree(folder, Path(aside) / "before")
        found = _launch(world_size, folder, jobs)
        if -signal.SIGSEGV not in found[1]:
            return found
        print(f"a process crashed: {found[1:]}", file=sys.__stderr__)
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
    return _launch(world_size, folder, jobs)


def _launch(world_size: int, folder: Path, jobs: dict[str, Any]) -> tuple[dict[str, Any], list[int], str]:
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["support.together"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    together = [start.Process(target=work, args=(rank, world_size, port, folder, jobs)) for rank in range(world_size)]
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not tell the server where to look
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        for one in together:
            one.start()
    for one in together:
        one.join()
    found = {name: folder / f"{name}.json" for name in jobs}
    said = "".join((folder / f"{rank}.txt").read_text() for rank in range(world_size))
    measured = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    return measured, [one.exitcode for one in together], said
