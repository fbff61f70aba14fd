"""torch.compile: where it works, and what of a model it is given."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from heedful.models.base import Model
from heedful.nn.block import Block
from heedful.train import loss


@functools.cache
def problem(device: torch.device) -> str | None:
    """Why nothing can be compiled here, None if it can: no C++ compiler, or no Triton for this GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # the compiler's own kinds of errors, and those of the tools it starts
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0][:200]
    return None


def compile_model(model: Model, *, whole: bool = True) -> None:
    """Compile all that comes before the head as one, or each block (sharded models are put together block by block);
    and what cross-entropy does with the logits."""
    hidden: Callable[..., Any] | None = getattr(model, "hidden", None)
    if whole and hidden is not None:
        setattr(model, "hidden", torch.compile(hidden))  # noqa: B010 (not every family has one)
    else:
        for module in model.modules():
            if isinstance(module, Block):
                module.compile()
    loss.surprise_of = torch.compile(loss.surprise)
