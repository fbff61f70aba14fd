"""The trainer: one loop for every family and every kind of data.

A step: micro-batches -> summed losses -> gradients -> added over all processes -> divided once by the number of targets
of the whole step, and clipped -> optimizer. So 4 x 8 examples give what 1 x 32 give, on any number of processes.

All randomness of a step follows from the seed and the step number, and so does the data it reads: weights, optimizer
state and step number are all a checkpoint needs. A resumed run is bit for bit the run that was never interrupted.
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

import numpy as np
import torch
from torch import Tensor, nn

from heedful.data.dataset import Dataset, count_tokens
from heedful.data.loader import BatchLoader
from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.memory import keep_memory
from heedful.models.base import Batch, Model
from heedful.nn.stack import Stack
from heedful.openmp import warn_if_slowed
from heedful.train import optimizers
from heedful.train.diagnostics import TrainingDiverged, first_nonfinite_layer, out_of_memory_advice
from heedful.train.distributed import Processes
from heedful.train.loss import Scores, fetch_floats, mean_scores
from heedful.train.objectives import Objective
from heedful.train.recipe import Recipe
from heedful.train.runlog import RunLog
from heedful.train.torch_compile import compile_if_wanted
from heedful.train.update import Update, graphed_if_wanted
from heedful.train.utilisation import UtilisationMeter
from heedful.train.validation import LossModule as LossModule
from heedful.train.validation import validate as validate
from heedful.weights.load import is_sharded

UTILISATION_AFTER = 20  # steps: until then no FLOPs are counted


@dataclass
class Summary:
    """How training ended."""

    step: int
    best: float  # lowest validation loss, infinite without validation
    best_step: int
    reason: str  # finished, stopped (by a signal), patience, target


@dataclass
class StepRecord:
    """One optimizer step, for the log; on a GPU its numbers may still be being computed."""

    step: int
    batches: list[Batch]
    numbers: Callable[[], dict[str, float]]  # waits for the loss and metric sums, and the gradient norm
    lr: float


class Trainer:
    """Trains a model by a recipe: steps, validation, early stopping, checkpoints, logging."""

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
        sample: Callable[[Model, int], str | np.ndarray | None] | None = None,
    ) -> None:
        """`save(trainer, is_best)` is called with every checkpoint, `sample(model, step)` with every evaluation."""
        self.recipe, self.settings = recipe, recipe.train
        self.processes = processes or Processes.alone(recipe.train.device)
        self.model, self.validation = model, validation
        if validation is None and (self.settings.patience or self.settings.target):
            early = "patience" if self.settings.patience else "target"
            wanted = "set data.share or data.validation"
            raise ValueError(f"train.{early} looks at the validation loss, and there is no validation data: {wanted}")
        self.log = log or RunLog(None, steps=self.settings.steps, settings=recipe.log, quiet=True)
        self.save, self.sample = save, sample
        accelerate(model, "training")
        for module in model.modules():
            if isinstance(module, Stack):
                module.recompute = self.settings.checkpoint_activations
        self.loss_module = LossModule(model, objective, self.settings.precision, self.processes.device)
        self.wrapped = self.processes.wrap(
            self.loss_module, sharded=self.settings.sharded, bfloat16=self.settings.precision == "bfloat16"
        )
        self.parameters = trainable_parameters(model)
        if not self.parameters:
            raise ValueError("every parameter is frozen, so nothing can be trained: see [adapter]")
        self.optimizer = optimizers.make_optimizer(model, recipe.optimizer)
        self.ema = optimizers.EMA(model, self.settings.ema) if self.settings.ema else None
        self.loader = BatchLoader(
            train,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            accumulate=self.settings.accumulate,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            workers=self.settings.workers,
        )
        self.eval_every = self.settings.eval_every or max(1, self.settings.steps // 10)
        self.save_every = self.settings.save_every or self.eval_every
        self.step, self.best, self.best_step, self.evaluations_without_best, self.nonfinite_steps = 0, math.inf, 0, 0, 0
        self.stopping = False
        self._unlogged: deque[StepRecord] = deque()
        self._clock, self._began = 0.0, 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=UTILISATION_AFTER)  # tokens and seconds of steps
        update = Update(self.wrapped, self.parameters, self.optimizer, self.ema, self.processes, self.settings.clip)
        self.update = graphed_if_wanted(update, self.settings, self.log.note)
        compiled = compile_if_wanted(model, objective, self.settings, self.processes.device, self.log.note)
        copyable = not (compiled or any(map(is_sharded, self.parameters)))
        self._meter = UtilisationMeter(
            model, objective, self.processes.device, self.settings.precision, self.log.note, copyable=copyable
        )

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and plain numbers: with the model's weights, all that the next step depends on.

        With an EMA, the averaged weights are saved as the model, and the weights being trained are among these tensors.
        """
        tensors, numbers = optimizers.optimizer_state(self.optimizer, self.model)
        tensors = {f"optimizer.{name}": value for name, value in tensors.items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": value for name, value in self.ema.tensors().items()}
        return tensors, {
            "step": self.step,
            "best": self.best if math.isfinite(self.best) else None,
            "best_step": self.best_step,
            "worse": self.evaluations_without_best,
            "optimizer": numbers,
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continue from what `state` returned; the weights of that checkpoint are in the model already."""

        def part(name: str) -> dict[str, Tensor]:
            return {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}

        optimizers.load_optimizer_state(self.optimizer, self.model, part("optimizer"), numbers["optimizer"])
        if self.ema is not None:
            self.ema.restore(part("ema"))
            self.ema.swap()
        self.step, self.best_step, self.evaluations_without_best = (
            numbers["step"],
            numbers["best_step"],
            numbers["worse"],
        )
        self.best = math.inf if numbers["best"] is None else numbers["best"]

    # --- training --------------------------------------------------------------------------------------------------

    def train(self) -> Summary:
        """Train from the current step to the recipe's last, or until a signal or an early-stopping rule ends it."""
        self.model.train()
        if self.processes.device.type == "cpu":
            keep_memory()
        reason = "finished"
        with self._interruptible():
            self._clock, self._began = time.perf_counter(), self.step
            if self.settings.eval_first and not self.step and not self.log.history.validation:
                self._evaluate(first=True)
            for read in self.loader.steps(self.step, self.settings.steps):
                batches = self._prepare(read)
                with out_of_memory_advice(
                    self.recipe, self.model, self.loss_module.objective, batches, world_size=self.processes.world_size
                ):
                    self._step(batches)
                last = self.step == self.settings.steps
                better = False
                if self.step % self.eval_every == 0 or last:
                    better = self._evaluate()
                    reason = self._early_stop() or reason
                stopping = reason != "finished" or self.processes.any_process(self.stopping)
                if better or last or stopping or self.step % self.save_every == 0:
                    self._save(better)
                if stopping:
                    reason = "stopped" if reason == "finished" and not last else reason
                    break
            self._log_steps()
        return Summary(self.step, self.best, self.best_step, reason)

    def _prepare(self, batches: list[Batch]) -> list[Batch]:
        """What the objective makes of batches with the weights as they are; most leave them alone."""
        prepare = getattr(self.loss_module.objective, "prepare", None)
        if prepare is None:
            return batches
        with self.processes.unsharded(self.model):
            return [prepare(self.model, batch) for batch in batches]

    def _step(self, batches: list[Batch]) -> None:
        """One step: seed, learning rate, update, log."""
        seed_step(self.settings.seed, self.step, self.processes.rank, self.processes.device)
        factor = optimizers.lr_factor(self.recipe.schedule, self.step, self.settings.steps)
        optimizers.set_lr(self.optimizer, factor)
        if self.ema is not None:
            self.ema.count_step()
        for _ in range(getattr(self.loss_module.objective, "updates", 1)):
            sums = self.update(batches)
        numbers = fetch_floats(sums)
        self.step += 1
        self._unlogged.append(StepRecord(self.step, batches, numbers, factor * self.recipe.optimizer.lr))
        if self.processes.device.type == "cpu":
            warn_if_slowed()
        # A GPU is given its next step before the numbers of the last one are fetched.
        self._log_steps(behind=1 if self.processes.device.type == "cuda" else 0)

    def _log_steps(self, behind: int = 0) -> None:
        """Log all steps but the last `behind`. A step whose gradient is not finite did not update the weights; several
        in a row end the training."""
        while len(self._unlogged) > behind:
            record = self._unlogged.popleft()
            numbers = record.numbers()
            norm = numbers.pop("norm")
            scores = mean_scores(numbers)
            seconds = time.perf_counter() - self._clock
            tokens = sum(count_tokens(b) for b in record.batches) * self.processes.world_size
            self._recent.append((tokens, seconds))
            self.log.step(
                record.step,
                scores.loss,
                lr=record.lr,
                norm=norm,
                tokens=tokens,
                seconds=seconds,
                utilisation=self._utilisation(record),
                metrics=scores.metrics,
            )
            self._clock = time.perf_counter()
            self.nonfinite_steps = 0 if math.isfinite(norm) else self.nonfinite_steps + 1
            if self.nonfinite_steps:
                self._check_diverged(record)

    def _utilisation(self, record: StepRecord) -> float | None:
        """Model FLOPs utilisation of the last steps (a GPU's last two end at once in the log); None in the first ones:
        counting FLOPs would delay the start."""
        if self.log.quiet or record.step < self._began + UTILISATION_AFTER:
            return None
        tokens, seconds = map(sum, zip(*self._recent, strict=True))
        rate = tokens / self.processes.world_size / max(seconds, 1e-9)
        return self._meter.utilisation(rate, record.batches[0])

    def _check_diverged(self, record: StepRecord) -> None:
        """Note a step with a non-finite gradient; TrainingDiverged after `halt_after` in a row."""
        self.log.note(f"step {record.step} skipped: its gradient is not finite ({self.nonfinite_steps} in a row)")
        if self.nonfinite_steps >= self.settings.halt_after:
            batch = self.processes.to_device(record.batches[0])
            layer = first_nonfinite_layer(self.loss_module, batch, self.processes.gather_texts)
            raise TrainingDiverged(
                f"{self.nonfinite_steps} steps in a row had no finite gradient; the first layer with one is {layer}. "
                "The last checkpoint is intact: try a lower optimizer.lr, a longer schedule.warmup or train.precision "
                "float32"
            )

    # --- validation ------------------------------------------------------------------------------------------------

    def validate(self) -> Scores:
        """Mean loss and metrics over the validation data, of the averaged weights if there is an EMA."""
        assert self.validation is not None
        with self._ema_weights():
            return validate(
                self.wrapped,
                self.validation,
                batch_size=max(1, self.settings.batch_size // self.settings.accumulate),
                n_batches=self.settings.eval_batches,
                processes=self.processes,
                prepare=self._prepare,
            )

    def _ema_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has its averaged weights, if there is an EMA."""
        return nullcontext() if self.ema is None else self.ema.swapped()

    def _evaluate(self, *, first: bool = False) -> bool:
        """Validate, log the scores and a generated sample; True if the validation loss is the lowest so far, that of
        the `first` evaluation, before any step, not counted."""
        self._log_steps()
        if self.validation is None:
            return False
        scores = self.validate()
        self.log.validation(self.step, scores.loss, scores.metrics)
        if self.sample is not None:
            with self._ema_weights(), self.processes.unsharded(self.model):
                made = self.sample(self.model, self.step) if self.processes.main else None
            self.model.train()
            if made is not None:
                self.log.sample(self.step, made)
        better = scores.loss < self.best and not first
        if better:
            self.best, self.best_step, self.evaluations_without_best = scores.loss, self.step, 0
        elif not first:
            self.evaluations_without_best += 1
        self._clock = time.perf_counter()
        return better

    def _early_stop(self) -> str | None:
        """The early-stopping rule that applies, None if training goes on."""
        if self.settings.patience and self.evaluations_without_best >= self.settings.patience:
            if self.step < self.settings.steps:
                self.log.note(
                    f"stopped early, at step {self.step:,} of {self.settings.steps:,}: the validation loss was lowest "
                    f"at step {self.best_step:,} ({self.best:.4f}), and {self.settings.patience} evaluations since "
                    "were no better; that checkpoint is the result. --set train.patience=0 never stops early"
                )
            return "patience"
        if self.settings.target and self.best <= self.settings.target:
            return "target"
        return None

    def _save(self, better: bool) -> None:
        """Write a checkpoint; the log is flushed first, so that no step up to it is missing."""
        self._log_steps()
        self.log.flush()
        if self.save is not None:
            with self._ema_weights():
                self.save(self, better)
        self._clock = time.perf_counter()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends training after the current step with a checkpoint, the second at once."""
        first_signal = 0.0

        def stop(number: int, frame: object) -> None:
            nonlocal first_signal
            if self.stopping and time.monotonic() - first_signal >= self.processes.signal_repeat_seconds:
                raise KeyboardInterrupt
            if self.stopping:
                return
            self.stopping, first_signal = True, time.monotonic()
            self.log.note("stopping after this step; once more stops at once, without saving")

        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            before = {number: signal.signal(number, stop) for number in numbers}
        except ValueError:  # not the main thread: signals are left to the caller
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch for dropout and all other randomness of a step (torch uses 32 bits of a seed)."""
    number = zlib.crc32(f"{seed}.{step}.{rank}".encode())
    # torch.manual_seed would also seed unused devices, with a traceback for each: 0.7 ms.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
