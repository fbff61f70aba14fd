"""One trainer for every family and every kind of data: it knows models by their objective and data by numbers.

A step:  micro-batches -> sums of losses -> gradients -> added over all processes -> divided once by the number of
targets of the whole step and clipped -> optimizer. So 4 x 8 examples give what 1 x 32 give, on any number of processes.

What is random in a step follows from the seed and the step, and so does what it reads: weights, optimizer and the
number of the step are all there is to remember. A resumed run is the run that was never interrupted.
"""

from __future__ import annotations

import math
import signal
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful.data.dataset import Dataset
from heedful.data.loader import BatchLoader
from heedful.kernels.cpu.memory import keep_memory
from heedful.models.base import Batch, Model
from heedful.nn.stack import Stack
from heedful.train import compiled, cost, optim, schedule
from heedful.train.distributed import Processes, is_spread
from heedful.train.faults import TrainingHalted, first_bad_layer, memory_advice
from heedful.train.objectives import Loss, Objective
from heedful.train.recipe import Recipe
from heedful.train.runlog import RunLog
from heedful.train.scores import Scores, add, evaluate, fetch, means, n_tokens

MEASURED_AFTER = 20  # steps


@dataclass
class Summary:
    """How a training ended."""

    step: int
    best: float  # validation loss, infinite where there is no validation
    best_step: int
    reason: str  # finished, stopped, patience, target


@dataclass
class Taken:
    """A step as it went; its numbers may still be on their way."""

    step: int
    batches: list[Batch]
    numbers: Callable[[], dict[str, float]]  # the sums, and the norm of the gradient
    lr: float


class Task(nn.Module):
    """Model and objective as one module whose forward is the loss: what DDP, FSDP2 and torch.compile wrap."""

    def __init__(self, model: Model, objective: Objective, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model, self.objective = model, objective
        self.kind = device.type
        self.mixed = precision == "bfloat16"

    def forward(self, batch: Batch) -> Loss:
        mixed = torch.autocast(self.kind, torch.bfloat16) if self.mixed else nullcontext()
        with mixed:
            return self.objective(self.model, batch)


class Trainer:
    def __init__(
        self,
        model: Model,
        objective: Objective,
        train: Dataset,
        validation: Dataset | None,
        recipe: Recipe,
        *,
        processes: Processes | None = None,
        log: RunLog | None = None,
        save: Callable[[Trainer, bool], None] | None = None,
        sample: Callable[[Model, int], str | None] | None = None,
    ) -> None:
        """`save(trainer, is_best)` and `sample(model, step)` are called with every evaluation."""
        self.recipe, self.settings = recipe, recipe.train
        self.processes = processes or Processes.alone(recipe.train.device)
        self.model, self.validation = model, validation
        if validation is None and (self.settings.patience or self.settings.target):
            early = "patience" if self.settings.patience else "target"
            raise ValueError(
                f"train.{early} looks at the validation loss, and there is no validation data: set data.share or "
                "data.validation"
            )
        self.log = log or RunLog(None, steps=self.settings.steps, settings=recipe.log, quiet=True)
        self.save, self.sample = save, sample
        for module in model.modules():
            if isinstance(module, Stack):
                module.recompute = self.settings.checkpoint_activations
        self.task = Task(model, objective, self.settings.precision, self.processes.device)
        self.called = self.processes.wrap(
            self.task, sharded=self.settings.sharded, bfloat16=self.settings.precision == "bfloat16"
        )
        self.parameters = learning(model)
        if not self.parameters:
            raise ValueError("nothing is left to train: every parameter is frozen (see [adapter])")
        self.optimizer = optim.make(model, recipe.optimizer)
        self.ema = optim.Ema(model, self.settings.ema) if self.settings.ema else None
        self.loader = BatchLoader(
            train,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            accumulate=self.settings.accumulate,
            rank=self.processes.rank,
            world=self.processes.world,
            workers=self.settings.workers,
        )
        self.eval_every = self.settings.eval_every or max(1, self.settings.steps // 10)
        self.save_every = self.settings.save_every or self.eval_every
        self.step, self.best, self.best_step, self.worse, self.bad = 0, math.inf, 0, 0, 0
        self.stopping = False
        self._untold: deque[Taken] = deque()
        self._clock, self._began = 0.0, 0
        self._full_speed: float | None = None  # tokens/s if there were nothing but matrix products
        self._compiled = False
        self._compile()

    # --- what a checkpoint holds beside the weights ----------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name and plain numbers: with the model, all that the next step depends on.

        Where there is a running mean of the weights, it is the model that is saved, and the weights are here.
        """
        tensors, numbers = optim.tensors(self.optimizer, self.model)
        tensors = {f"optimizer.{name}": value for name, value in tensors.items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": value for name, value in self.ema.tensors().items()}
        return tensors, {
            "step": self.step,
            "best": self.best if math.isfinite(self.best) else None,
            "best_step": self.best_step,
            "worse": self.worse,
            "optimizer": numbers,
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on where `state` was taken; the model has the weights of then already."""

        def part(name: str) -> dict[str, Tensor]:
            return {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}

        optim.restore(self.optimizer, self.model, part("optimizer"), numbers["optimizer"])
        if self.ema is not None:
            self.ema.restore(part("ema"))
            self.ema.swap()
        self.step, self.best_step, self.worse = numbers["step"], numbers["best_step"], numbers["worse"]
        self.best = math.inf if numbers["best"] is None else numbers["best"]

    def _compile(self) -> None:
        """Let PyTorch's compiler join what lies between the products, where that pays: on a GPU."""
        device, wanted = self.processes.device, self.settings.compile
        if wanted == "no" or (wanted == "auto" and device.type != "cuda"):
            return
        problem = compiled.problem(device)
        if problem is not None:
            self.log.note(f"torch.compile does not work here ({problem}): going on without it")
        else:
            compiled.compile_model(self.model, whole=not self.settings.sharded)
            self._compiled = True

    # --- training --------------------------------------------------------------------------------------------------

    def train(self) -> Summary:
        """From where it is to the end of the recipe, or until it is stopped."""
        self.model.train()
        if self.processes.device.type == "cpu":
            keep_memory()
        reason = "finished"
        with self._interruptible():
            self._clock, self._began = time.perf_counter(), self.step
            for batches in self.loader.steps(self.step, self.settings.steps):
                with memory_advice(self.recipe, self.model, self.task.objective, batches, world=self.processes.world):
                    self._step(batches)
                last = self.step == self.settings.steps
                better = False
                if self.step % self.eval_every == 0 or last:
                    better = self._judge()
                    reason = self._enough() or reason
                stopping = reason != "finished" or self.processes.any(self.stopping)
                if better or last or stopping or self.step % self.save_every == 0:
                    self._save(better)
                if stopping:
                    reason = "stopped" if reason == "finished" and not last else reason
                    break
            self._tell()
        return Summary(self.step, self.best, self.best_step, reason)

    def _step(self, batches: list[Batch]) -> None:
        """One step of the optimizer."""
        settings, processes = self.settings, self.processes
        seed_step(settings.seed, self.step, processes.rank)
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            with processes.reducing(self.called, i + 1 == len(batches)):
                loss: Loss = self.called(processes.move(batch))
                loss.sum.backward()
            add(sums, loss)
        processes.sum(sums)
        norm = optim.finish_gradients(self.parameters, sums["targets"], settings.clip)
        factor = schedule.factor(self.recipe.schedule, self.step, settings.steps)
        optim.set_lr(self.optimizer, factor)
        optim.step(self.optimizer, norm)
        if self.ema is not None:
            self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        numbers = fetch({**sums, "norm": norm.detach()})
        self._untold.append(Taken(self.step, batches, numbers, factor * self.recipe.optimizer.lr))
        # A GPU is given its next step before we ask it how the last one went.
        self._tell(behind=1 if processes.device.type == "cuda" else 0)

    def _tell(self, behind: int = 0) -> None:
        """Log the steps that are not logged yet, but for so many; one without a finite gradient has changed nothing,
        and several in a row end the training."""
        while len(self._untold) > behind:
            taken = self._untold.popleft()
            numbers = taken.numbers()
            norm = numbers.pop("norm")
            scores = means(numbers)
            seconds = time.perf_counter() - self._clock
            tokens = sum(n_tokens(b) for b in taken.batches) * self.processes.world
            self.log.step(
                taken.step,
                scores.loss,
                lr=taken.lr,
                norm=norm,
                tokens=tokens,
                seconds=seconds,
                utilisation=self._share(tokens / self.processes.world / seconds, taken),
                metrics=scores.metrics,
            )
            self._clock = time.perf_counter()
            self.bad = 0 if math.isfinite(norm) else self.bad + 1
            if self.bad:
                self._report_bad(taken)

    def _share(self, tokens_per_second: float, taken: Taken) -> float | None:
        """The share of this machine's rate that goes into the model; found out a while after the beginning, so that
        nobody waits for it."""
        if self.log.quiet or taken.step < self._began + MEASURED_AFTER:
            return None
        if self._full_speed is None:
            batch = cost.take_rows(taken.batches[0], 1)
            # A model in parts, or compiled, cannot be copied; one of its kind without weights costs the same.
            changed = self._compiled or any(map(is_spread, self.parameters))
            model = type(self.model).create(self.model.config, device="meta") if changed else self.model
            flops = cost.count_flops(model, self.task.objective, batch).training / max(1, n_tokens(batch))
            kind = torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32
            self._full_speed = cost.peak_rate(str(self.processes.device), kind) / max(1.0, flops)
        return tokens_per_second / self._full_speed

    def _report_bad(self, taken: Taken) -> None:
        self.log.note(f"step {taken.step} skipped: its gradient is not finite ({self.bad} in a row)")
        if self.bad >= self.settings.halt_after:
            batch = self.processes.move(taken.batches[0])
            layer = first_bad_layer(self.task, batch, self.processes.texts)
            raise TrainingHalted(
                f"{self.bad} steps in a row had no finite gradient; the first layer with one is {layer}. The last "
                "checkpoint is intact: try a lower optimizer.lr, a longer schedule.warmup or train.precision float32"
            )

    # --- judging ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> Scores:
        """The mean over the validation data, with the running mean of the weights if there is one."""
        assert self.validation is not None
        with self._averaged():
            return evaluate(
                self.called,
                self.validation,
                batch_size=max(1, self.settings.batch_size // self.settings.accumulate),
                n_batches=self.settings.eval_batches,
                processes=self.processes,
            )

    def _averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has the running mean of its weights, if there is one."""
        return nullcontext() if self.ema is None else self.ema.swapped()

    def _judge(self) -> bool:
        """Evaluate and show a sample; True if it is the best so far."""
        self._tell()
        if self.validation is None:
            return False
        scores = self.evaluate()
        self.log.evaluated(self.step, scores.loss, scores.metrics)
        if self.sample is not None:
            with self._averaged(), self.processes.usable(self.model):
                text = self.sample(self.model, self.step) if self.processes.main else None
            self.model.train()
            if text is not None:
                self.log.sample(self.step, text)
        better = scores.loss < self.best
        if better:
            self.best, self.best_step, self.worse = scores.loss, self.step, 0
        else:
            self.worse += 1
        self._clock = time.perf_counter()
        return better

    def _enough(self) -> str | None:
        """Why to stop early, if there is a reason."""
        if self.settings.patience and self.worse >= self.settings.patience:
            return "patience"
        if self.settings.target and self.best <= self.settings.target:
            return "target"
        return None

    def _save(self, better: bool) -> None:
        self._tell()
        self.log.flush()
        if self.save is not None:
            with self._averaged():
                self.save(self, better)
        self._clock = time.perf_counter()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) ends training after the step at hand, the second at once."""

        asked = 0.0

        def stop(number: int, frame: object) -> None:
            nonlocal asked
            if self.stopping and time.monotonic() - asked >= self.processes.echo:
                raise KeyboardInterrupt
            if self.stopping:
                return
            self.stopping, asked = True, time.monotonic()
            self.log.note("stopping after this step; once more stops at once, without saving")

        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            before = {number: signal.signal(number, stop) for number in numbers}
        except ValueError:  # not the main thread: whoever runs us deals with signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def learning(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout and whatever else is drawn in a step follow from these three (torch reads 32 bits of a seed)."""
    number = zlib.crc32(f"{seed}.{step}.{rank}".encode())
    # torch.manual_seed also seeds the devices that nobody uses, and keeps a traceback for each: 0.7 ms.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
