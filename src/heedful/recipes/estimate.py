"""`heedful estimate RECIPE`: parameters, FLOPs, memory by part and whether it fits, and the training time on this
machine, extrapolated from a few real steps on random tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from heedful.data.dataset import count_tokens
from heedful.recipes.dry_run import DryRun, dry_run
from heedful.text.plural import counted
from heedful.train import cost
from heedful.train.adapters import adapt
from heedful.train.cost import FittingChanges, Flops, MemoryUse, ParameterCounts
from heedful.train.distributed import Processes
from heedful.train.progress import format_count
from heedful.train.recipe import Recipe
from heedful.train.runlog import RunLog
from heedful.train.trainer import Trainer
from heedful.weights.describe import format_bytes

PROBE_SECONDS = 4.0  # of timed steps, after the first
MAX_STEPS = 30
SLOWEST_STEP = 2.5  # seconds; a step that would take longer at USUAL_SHARE is not timed
STAT = Path("/proc/stat")
BUSY_SHARE = 0.1  # of the cores: below, a machine counts as idle
USUAL_SHARE = 0.5  # of the peak rate: the utilisation that large models reach


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a training."""

    parameters: ParameterCounts
    memory: MemoryUse  # of one process
    limit: int | None  # bytes available
    fits: list[FittingChanges]  # changes that fit, if the recipe does not
    flops: Flops  # of `tokens_per_step`
    tokens_per_step: int  # images, where there are no tokens
    steps: int
    seconds_per_step: float
    steps_tried: int  # 0: the time is derived from the peak rate
    peak: float  # FLOP/s of a matrix product
    others: float  # cores that other programs used while this was measured
    notes: list[str]

    @property
    def is_enough(self) -> bool:
        """Whether the memory is sufficient, with a margin."""
        return self.limit is None or self.memory.total * cost.MARGIN <= self.limit

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation of the measured steps."""
        return cost.utilisation(self.flops.training, 1 / self.seconds_per_step, self.peak)


def estimate_report(recipe: Recipe, *, limit: int | None = None) -> str:
    """The estimate as text; `limit` is the available memory in bytes, by default this machine's."""
    plan = dry_run(recipe)
    return _report(plan, estimate_training(plan, limit=limit))


def estimate_training(plan: DryRun, *, limit: int | None = None) -> Estimate:
    """Count parameters and FLOPs, trace memory, and time a few steps if they fit and are short."""
    recipe, model = plan.recipe, plan.model
    settings, device = recipe.train, Processes.alone(recipe.train.device).device
    with _stages() as stage:
        stage("counting operations")
        some = plan.batch(min(2, settings.batch_size))
        flops, share = cost.count_flops(model, plan.objective, some), settings.batch_size / _n_rows(some)
        whole = Flops(round(flops.forward * share), round(flops.training * share))
        stage("tracing the memory of a step")
        batch = plan.batch(math.ceil(settings.batch_size / settings.accumulate))
        memory = cost.measure_memory(model, plan.objective, batch, recipe, device=device)
        limit = cost.free_memory(device) if limit is None else limit
        enough = limit is None or memory.total * cost.MARGIN <= limit
        fits: list[FittingChanges] = []
        if not enough:
            assert limit is not None
            stage("looking for settings that fit")
            fits = cost.find_fitting_changes(model, plan.objective, batch, recipe, limit, device=device)
        stage("measuring this machine")
        used, began = _used_by_others(), time.perf_counter()
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        peak = cost.peak_rate(str(device), dtype)
        seconds, tried = whole.training / (USUAL_SHARE * peak), 0
        if enough and not plan.has_teacher and seconds <= SLOWEST_STEP:
            stage("trying a few steps")
            seconds, tried = _time_steps(plan)
        others = (_used_by_others() - used) / (time.perf_counter() - began)
    return Estimate(
        cost.count_parameters(model),
        memory,
        limit,
        fits,
        whole,
        round(count_tokens(some) * share),
        settings.steps,
        seconds,
        tried,
        peak,
        others,
        plan.notes,
    )


def _n_rows(batch: Any) -> int:
    return len(batch.tokens if batch.tokens is not None else batch.images)


# --- time ------------------------------------------------------------------------------------------------------------


class _StepTimer(RunLog):
    """A log that records the time of each step and stops the training after PROBE_SECONDS."""

    trainer: Trainer

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(None, steps=recipe.train.steps, settings=recipe.log, quiet=True)
        self.seconds: list[float] = []
        self.began = 0.0

    def step(self, step: int, loss: float, *, seconds: float, **_: Any) -> None:
        now = time.perf_counter()
        if not self.seconds:
            self.began = now  # the first step allocates, compiles and so on
        self.seconds.append(seconds)
        self.trainer.stopping = len(self.seconds) > 2 and now - self.began > PROBE_SECONDS

    def note(self, text: str, *, show: bool = True) -> None:
        """Ignored: steps on random tokens may diverge."""


def _time_steps(plan: DryRun) -> tuple[float, int]:
    """The mean seconds of a real step on random examples, and the number of steps timed.

    Not the median: next to another program most steps may be fast, and a few wait long for a core.
    """
    trial = cost.with_settings(
        plan.recipe,
        {
            "train.steps": MAX_STEPS,
            "train.eval_every": 10**9,
            "train.save_every": 10**9,
            "train.ema": 0.0,
            "train.patience": 0,
            "train.target": 0.0,
        },
    )
    model = type(plan.model).create(plan.model.config)
    adapt(model, trial.adapter)
    clock = _StepTimer(trial)
    trainer = Trainer(model, plan.objective, plan.data, None, trial, log=clock)
    clock.trainer = trainer
    trainer.train()
    return fmean(clock.seconds[1:]), len(clock.seconds) - 1


def _used_by_others() -> float:
    """Seconds of the cores that other programs have used so far; 0 where the system does not say (only Linux does)."""
    try:
        line = STAT.read_text(encoding="ascii").split("\n", 1)[0]
        return sum(map(int, line.split()[1:4])) / os.sysconf("SC_CLK_TCK") - time.process_time()
    except (OSError, ValueError):
        return 0.0


# --- the report ------------------------------------------------------------------------------------------------------


def _report(plan: DryRun, e: Estimate) -> str:
    settings, unit = plan.recipe.train, "images" if plan.batch(1).tokens is None else "tokens"
    lines = [
        f"{plan.model.family} of {e.parameters.total:,} parameters, "
        f"{counted(e.steps, 'step')} of {counted(settings.batch_size, 'example')}",
        "",
        *_rows({"parameters": e.parameters.total, "of them learn": e.parameters.trainable}, "{:,}"),
        *_rows({"embeddings": e.parameters.embedding}, "{:,}"),
        "",
        *_rows({f"{unit} of a step": e.tokens_per_step, "in all": e.tokens_per_step * e.steps}, "{:,}"),
        "",
        *_rows(
            {
                f"FLOPs per {unit[:-1]}": format_count(e.flops.training / e.tokens_per_step),
                "forward alone": format_count(e.flops.forward / e.tokens_per_step),
                "in all": f"{e.flops.training * e.steps:.3g}",
            }
        ),
        "",
        *_memory(plan, e),
        "",
        *_time(e, unit),
    ]
    lines += ["", *(f"note: {note}" for note in e.notes)] if e.notes else []
    return "\n".join(lines)


def _rows(values: Mapping[str, Any], form: str = "{}") -> list[str]:
    return [f"{name:<24}{form.format(value):>20}" for name, value in values.items()]


def _memory(plan: DryRun, e: Estimate) -> list[str]:
    names = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": f"optimizer ({plan.recipe.optimizer.name})",
        "average": "running mean",
        "activations": "activations",
        "logits": "logits",
    }
    parts = {names[part]: format_bytes(n) for part, n in e.memory.parts().items() if n > e.memory.total / 1000}
    device = Processes.alone(plan.recipe.train.device).device
    lines = [f"memory on {device.type}, when most is in use", *_rows(parts)]
    lines += _rows({"together": format_bytes(e.memory.total)})
    later = sum(p.nbytes for p in plan.model.parameters() if p.requires_grad)
    if e.memory.gradients < 0.9 * later:
        lines.append(f"(gradients, {format_bytes(later)} in the end, come as activations go)")
    if e.limit is None:
        return lines
    lines += _rows({"there are": format_bytes(e.limit)})
    if e.is_enough:
        return [*lines, "it fits"]
    if not e.fits:
        return [
            *lines,
            "it does not fit, and no setting makes it: take a smaller model or --set adapter.kind=lora",
        ]
    lines.append("it does not fit; this does:")
    return lines + [f"  {fit.as_options()}   ({format_bytes(fit.memory.total)})" for fit in e.fits]


def _time(e: Estimate, unit: str) -> list[str]:
    total = e.seconds_per_step * e.steps
    rate = format_count(e.tokens_per_step / e.seconds_per_step)
    if e.steps_tried:
        how = (
            f"from {e.steps_tried} steps on this machine: {_duration(e.seconds_per_step)} each, {rate} {unit}/s, "
            f"{e.utilisation:.0%} of the {format_count(e.peak)}FLOP/s of its matrix products"
        )
    else:
        how = (
            f"not measured: at {USUAL_SHARE:.0%} of the {format_count(e.peak)}FLOP/s that a matrix product reaches on "
            f"this machine, a step takes {_duration(e.seconds_per_step)}"
        )
    lines = [*_rows({"time": _duration(total)}), how, "without evaluation and checkpoints"]
    cores = os.cpu_count() or 1
    if e.others > BUSY_SHARE * cores:
        lines.append(f"other programs used {e.others:.1f} of {cores} cores meanwhile: on an idle machine it is faster")
    else:
        lines.append("on an idle machine, as it is now: next to programs that use the cores it takes longer")
    return lines


def _duration(seconds: float) -> str:
    """8000 -> 2 h 13 min"""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    for size, name, smaller, letter in (
        (525960, "years", 1440, "days"),
        (1440, "days", 60, "h"),
        (60, "h", 1, "min"),
    ):
        if minutes >= 2 * size or (size == 60 and minutes >= size):
            return f"{minutes // size:,} {name} {minutes % size // smaller} {letter}"
    return f"{minutes} min"


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """Shows the current stage and elapsed time on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)
