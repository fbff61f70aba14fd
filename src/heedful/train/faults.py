"""What goes wrong in a step, said so that a person can act: which layer broke, and what would fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, Model
from heedful.train import cost
from heedful.train.objectives import Objective
from heedful.train.recipe import Recipe


class TrainingHalted(ValueError):
    """Training cannot go on; the last checkpoint is intact."""


def first_bad_layer(task: nn.Module, batch: Batch, texts: Callable[[str], list[str]] = lambda text: [text]) -> str:
    """Where NaN or infinity first appears when this batch goes forward, or else backward.

    With several processes, each with its batch, all look and say the same; `texts` gives what each has found."""
    bad: list[str] = []
    names = {module: name.removeprefix("model.") for name, module in task.named_modules()}

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and not torch.isfinite(output).all():
            bad.append(names[module])

    hooks = [m.register_forward_hook(look) for m in names if not any(True for _ in m.children())]
    try:
        task.zero_grad()
        loss = task(batch)
        here = f"{bad[0]} (its output)" if bad else "" if torch.isfinite(loss.sum) else "the loss"
        if found := [text for text in texts(here) if text]:
            return found[0]
        loss.sum.backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [(name, p.grad) for name, p in task.named_parameters() if p.grad is not None]
    broken = [name for name, gradient in reversed(gradients) if not torch.isfinite(gradient).all()]
    here = f"{broken[0].removeprefix('model.')} (its gradient)" if broken else ""  # backward comes from the end
    return next((text for text in texts(here) if text), "none, now that it is run again")


@contextmanager
def memory_advice(
    recipe: Recipe,
    model: Model | None = None,
    objective: Objective | None = None,
    batches: Sequence[Batch] = (),
    *,
    world: int = 1,
) -> Iterator[None]:
    """Running out of memory says what to set so that it fits: with the model, its objective and the batches at hand
    this is rehearsed, without them it is what usually helps."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as problem:
        text = str(problem)
        full = isinstance(problem, torch.OutOfMemoryError | MemoryError)
        if not full and "not enough memory" not in text and "out of memory" not in text:
            raise
        advice = None
        if model is not None and objective is not None and batches and not recipe.train.sharded:
            with suppress(Exception):  # advice that fails must not hide what happened
                advice = _rehearsed_advice(recipe, model, objective, batches, world)
        raise ValueError(f"out of memory: {advice or _usual_advice(recipe)}") from problem


def _rehearsed_advice(
    recipe: Recipe, model: Model, objective: Objective, batches: Sequence[Batch], world: int
) -> str | None:
    free = cost.free_memory(model.device)
    if free is None:
        return None
    batch = max(batches, key=cost.n_numbers)
    rows = math.ceil(recipe.train.batch_size / world / recipe.train.accumulate)
    now = cost.measure_memory(model, objective, cost.take_rows(batch, rows), recipe, device=model.device)
    needs = f"a step needs about {now.total / 1e9:.3g} GB, and there are {free / 1e9:.3g} GB"
    # It did not fit, whatever the system says: what does must be smaller.
    limit = min(free, 0.9 * now.total * cost.MARGIN)
    fits = cost.find_fit(model, objective, batch, recipe, limit, device=model.device, world=world)
    if not fits:
        fixed = now.weights + now.optimizer + now.average
        return (
            f"{needs}, and no setting makes it fit: weights and optimizer alone are {fixed / 1e9:.3g} GB. Take a "
            "smaller model, --set adapter.kind=lora, or several GPUs with --set train.sharded=true"
        )
    return f"{needs}. This fits: " + "; or ".join(
        f"{fit.as_options()} ({fit.memory.total / 1e9:.3g} GB)" for fit in fits
    )


def _usual_advice(recipe: Recipe) -> str:
    settings = recipe.train
    parts = min(settings.accumulate * 2, settings.batch_size)
    advice = []
    if parts > settings.accumulate:
        advice.append(f"--set train.accumulate={parts} (the same result in smaller parts)")
    if not settings.checkpoint_activations:
        advice.append("--set train.checkpoint_activations=true (a third more time)")
    if settings.precision != "bfloat16":
        advice.append("--set train.precision=bfloat16")
    advice = advice or [f"--set data.length={max(1, recipe.data.length // 2)}, or a smaller model"]
    return f"try {'; or '.join(advice)}"
