"""Number types that a device has."""

from __future__ import annotations

import torch

HAVE_FLOAT64 = frozenset({"cpu", "cuda", "meta"})  # others, such as Apple's GPUs, have no such numbers


def widest_float(device: torch.device) -> torch.dtype:
    """The float type with the most precision on a device: float64, or float32 where there is none."""
    return torch.float64 if device.type in HAVE_FLOAT64 else torch.float32
