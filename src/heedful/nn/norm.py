"""Normalization: `LayerNorm` is PyTorch's (Ba et al. 2016); `RMSNorm` drops the mean (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LayerNorm = nn.LayerNorm


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), computed in float32; Gemma's offset is 1."""

    def __init__(self, d_model: int, eps: float = 1e-6, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make weight + offset 1."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., E)."""
        if self.offset:
            weight = self.offset + self.weight.float()
            return nn.functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        # Of one type, so that PyTorch's fused version runs: queries and keys are bfloat16 under autocast.
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
