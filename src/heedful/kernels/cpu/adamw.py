"""Gradient norm, scaling and AdamW over lists of tensors, each by one call of the C kernels.

PyTorch loops over the tensors, and a small model has a hundred small ones. The kernels take lists of contiguous float32
tensors on a CPU (`supports_tensors`); PyTorch's operators are used for any other list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.kernels.cpu.library import library, prepare
from heedful.kernels.cpu.structs import INT64, POINTER, AdamWSettings

PLAIN = (Tensor, torch.nn.Parameter)


def supports_tensors(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels support these tensors: contiguous float32 on a CPU, of no tensor subclass."""
    return library() is not None and all([_plain(t) for t in tensors])


def _plain(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() and type(t) in PLAIN


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm over all tensors, a scalar on their device."""
    lib = library()
    if lib is None or not supports_tensors(tensors):
        return torch.nn.utils.get_total_norm(tensors)
    total: float = lib.sum_of_squares(len(tensors), _addresses(tensors), _sizes(tensors), torch.get_num_threads())
    return torch.tensor(total**0.5)


def scale_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors by one number, in place."""
    lib = library()
    if lib is None or not supports_tensors(tensors):
        # A float32 factor: with a float64 tensor PyTorch would multiply the tensors one by one.
        torch._foreach_mul_(tensors, factor.float() if isinstance(factor, Tensor) else factor)
    else:
        lib.scale_tensors(len(tensors), _addresses(tensors), _sizes(tensors), float(factor), torch.get_num_threads())


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW by the kernels where possible; same state, and same results to within rounding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any([p.is_cpu for group in self.param_groups for p in group["params"]]):
            prepare()  # compile here rather than in the first step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One optimizer step."""
        ready = closure is None and all([self._ready(group) for group in self.param_groups])
        if not ready:  # in the first step, torch's also creates the state
            return super().step(closure)
        for group in self.param_groups:
            self._step(group)
        return None

    def _ready(self, group: dict[str, Any]) -> bool:
        if not all([p.is_cpu for p in group["params"]]):
            return False
        weights = [p for p in group["params"] if p.grad is not None]
        return (
            not group["amsgrad"]
            and not group["maximize"]
            and not isinstance(group["lr"], Tensor)
            and all([self.state[p] for p in weights])
            and supports_tensors(weights)
            and supports_tensors([p.grad for p in weights])
            and supports_tensors([self.state[p]["step"] for p in weights])
        )

    def _step(self, group: dict[str, Any]) -> None:
        lib = library()
        assert lib is not None
        weights = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in weights]
        lists = [weights, [p.grad for p in weights]]
        lists += [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        settings = AdamWSettings(group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        addresses = [_addresses(tensors) for tensors in lists]
        lib.adamw_step(len(weights), *addresses, _sizes(weights), ctypes.byref(settings), torch.get_num_threads())
        torch.autograd.graph.increment_version(weights)  # so that a backward pass that saved them raises


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (POINTER * len(tensors))(*[t.data_ptr() for t in tensors])


def _sizes(tensors: Sequence[Tensor]) -> Any:
    return (INT64 * len(tensors))(*[t.numel() for t in tensors])
