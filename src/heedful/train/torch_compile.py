"""torch.compile: whether it works here, and which parts of a model are compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from heedful.data import augment
from heedful.kernels.cuda import fused_cross_entropy
from heedful.models.base import Batch, Model
from heedful.nn.block import Block
from heedful.train import distill, loss
from heedful.train.objectives import Objective
from heedful.train.recipe import TrainSettings


def compile_if_wanted(
    model: Model, objective: Objective, settings: TrainSettings, device: torch.device, report: Callable[[str], None]
) -> bool:
    """Compile the model, and a teacher, in place if the recipe says so ("auto": on a GPU) and it works here; whether it
    was."""
    if settings.compile == "no" or (settings.compile == "auto" and device.type != "cuda"):
        return False
    error = compile_error(device)
    if error is not None:
        report(f"torch.compile does not work here ({error}): going on without it")
        return False
    compile_model(model, whole=not settings.sharded)
    if isinstance(objective, distill.Distill):
        compile_model(objective.teacher, whole=False)  # many layers, and one graph for all
    return True


@functools.cache
def compile_error(device: torch.device) -> str | None:
    """Why torch.compile fails here (no C++ compiler, no Triton for this GPU); None if it works."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # the compiler's own exceptions, and those of the tools it runs
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0][:200]
    return None


def compile_model(model: Model, *, whole: bool = True) -> None:
    """Compile everything before the head as one graph, or each block alone (FSDP2 gathers parameters per block); and
    the losses of a chunk of logits, and the augmentation of images."""
    hidden: Callable[..., Any] | None = getattr(model, "hidden", None)
    if whole and hidden is not None:
        graph = torch.compile(hidden)

        def compiled(batch: Batch, *state: Any) -> Any:
            return hidden(batch, *state) if state else graph(batch)  # in decoding shapes change with every token

        setattr(model, "hidden", compiled)  # noqa: B010 (not every family has one)
    else:
        for module in model.modules():
            if isinstance(module, Block):
                module.compile()
    fused = fused_cross_entropy(model.device) or torch.compile(loss.cross_entropy_and_gradient)
    loss.compiled_cross_entropy[model.device.type] = fused
    distill.compiled_distillation = torch.compile(distill.distillation_and_gradient)
    augment.compiled_augment = torch.compile(augment.augment_images)
    augment.compiled_mix = torch.compile(augment.mix_images)
