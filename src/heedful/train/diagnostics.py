"""Diagnostics for a failed training step: the first layer with NaN or infinity, and settings that fit into memory."""

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


class TrainingDiverged(ValueError):
    """Too many steps in a row had a non-finite gradient; the last checkpoint is intact."""


def first_nonfinite_layer(
    loss_module: nn.Module, batch: Batch, gather_texts: Callable[[str], list[str]] = lambda text: [text]
) -> str:
    """The first layer whose output has NaN or infinity when this batch is run forward, or else the first whose gradient
    has when it is run backward.

    Of several processes, each with its own batch, all call this and return the same; `gather_texts` gives each the
    findings of all."""
    nonfinite: list[str] = []
    names = {module: name.removeprefix("model.") for name, module in loss_module.named_modules()}

    def check(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and not torch.isfinite(output).all():
            nonfinite.append(names[module])

    hooks = [m.register_forward_hook(check) for m in names if not any(True for _ in m.children())]
    try:
        loss_module.zero_grad()
        loss = loss_module(batch)
        here = f"{nonfinite[0]} (its output)" if nonfinite else "" if torch.isfinite(loss.sum) else "the loss"
        if found := [text for text in gather_texts(here) if text]:
            return found[0]
        loss.sum.backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [(name, p.grad) for name, p in loss_module.named_parameters() if p.grad is not None]
    bad_gradients = [name for name, gradient in reversed(gradients) if not torch.isfinite(gradient).all()]
    # Backward goes from the last layer to the first.
    here = f"{bad_gradients[0].removeprefix('model.')} (its gradient)" if bad_gradients else ""
    return next((text for text in gather_texts(here) if text), "none when the step is run again")


@contextmanager
def out_of_memory_advice(
    recipe: Recipe,
    model: Model | None = None,
    objective: Objective | None = None,
    batches: Sequence[Batch] = (),
    *,
    world_size: int = 1,
) -> Iterator[None]:
    """Turn running out of memory into a ValueError that says which settings would fit: measured on fake tensors if the
    model, objective and batches are given, else what usually helps."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as problem:
        text = str(problem)
        full = isinstance(problem, torch.OutOfMemoryError | MemoryError)
        if not full and "not enough memory" not in text and "out of memory" not in text:
            raise
        advice = None
        if model is not None and objective is not None and batches and not recipe.train.sharded:
            with suppress(Exception):  # a failure here must not hide the error itself
                advice = _measured_advice(recipe, model, objective, batches, world_size)
        raise ValueError(f"out of memory: {advice or _usual_advice(recipe)}") from problem


def _measured_advice(
    recipe: Recipe, model: Model, objective: Objective, batches: Sequence[Batch], world_size: int
) -> str | None:
    """Settings with which a step like this one fits, None if the free memory is unknown."""
    free = cost.free_memory(model.device)
    if free is None:
        return None
    batch = max(batches, key=cost.n_elements)
    rows = math.ceil(recipe.train.batch_size / world_size / recipe.train.accumulate)
    now = cost.measure_memory(model, objective, cost.take_rows(batch, rows), recipe, device=model.device)
    needs = f"a step needs about {now.total / 1e9:.3g} GB, and there are {free / 1e9:.3g} GB"
    # It did not fit, whatever the system reports as free: a suggestion must be smaller.
    limit = min(free, 0.9 * now.total * cost.MARGIN)
    fits = cost.find_fitting_changes(model, objective, batch, recipe, limit, device=model.device, world_size=world_size)
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
    """Settings that take less memory, without measuring."""
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
