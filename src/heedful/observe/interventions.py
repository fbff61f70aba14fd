"""Interventions for `capture(edit=...)`: zero ablation, mean ablation and activation patching.

Each function returns an edit, a function from an activation to its replacement of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.observe.capture import Edit


def zero_ablation(heads: Sequence[int] | None = None) -> Edit:
    """Replace by zero; with `heads`, only these heads of (B, H, T, D) or (B, H, T, S)."""
    return _of_heads(heads, torch.zeros_like)


def mean_ablation(heads: Sequence[int] | None = None) -> Edit:
    """Replace by the mean over batch and positions; with `heads`, only these heads."""

    def mean(x: Tensor) -> Tensor:
        positions = (0, *range(1 if x.ndim < 4 else 2, x.ndim - 1))
        return x.mean(dim=positions, keepdim=True).expand_as(x)

    return _of_heads(heads, mean)


def activation_patch(by: Tensor, positions: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> Edit:
    """Activation patching (Vig et al. 2020): replace by the activation of another run, at all or some positions."""

    def put(x: Tensor) -> Tensor:
        if by.shape[1:] != x.shape[1:] or by.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"{tuple(by.shape)} cannot replace {tuple(x.shape)}: run both on inputs of one length")
        other = by.to(x).expand_as(x)
        if positions is None:
            return other
        if not all(-x.shape[-2] <= place < x.shape[-2] for place in positions):
            raise ValueError(f"positions {list(positions)} of {tuple(x.shape)}: there are {x.shape[-2]}")
        made = x.clone()
        made[..., list(positions), :] = other[..., list(positions), :]
        return made

    return _of_heads(heads, put)


def _of_heads(heads: Sequence[int] | None, change: Edit) -> Edit:
    if heads is None:
        return change

    def edit(x: Tensor) -> Tensor:
        if x.ndim != 4 or not all(0 <= h < x.shape[1] for h in heads):
            raise ValueError(f"heads {list(heads)} of {tuple(x.shape)}: dimension 1 has to be the heads")
        made = x.clone()
        made[:, list(heads)] = change(x)[:, list(heads)]
        return made

    return edit
