"""Muon for a GPU: torch's, with the matrices of one shape orthogonalized together.

torch.optim.Muon (Jordan et al. 2024) takes one matrix after the other, some forty small kernels each: for small models
that takes longer than their gradients do.

    N matrices of one shape (A, B)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon, whose settings and state it has, in a few products for each shape of matrix.

    `found_inf`, a scalar on the GPU, makes a step change nothing if it is 1, as in torch's fused optimizers.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                self._step_of_shape(group, shape, matrices)
        return loss

    def _step_of_shape(self, group: dict[str, Any], shape: torch.Size, matrices: list[Tensor]) -> None:
        gradients = [p.grad for p in matrices if p.grad is not None]
        for p, gradient in zip(matrices, gradients, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        momenta = [self.state[p]["momentum_buffer"] for p in matrices]
        taken: Tensor | float = 1.0
        if self.found_inf is not None:
            taken = 1 - self.found_inf
            gradients = list(torch.where(taken > 0, torch.stack(gradients), torch.stack(momenta)).unbind())
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        together = orthogonalize(torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
        taken = taken * group["lr"]  # which may be a tensor
        torch._foreach_mul_(matrices, 1 - taken * group["weight_decay"])
        a, b = shape
        scale = 0.2 * math.sqrt(max(a, b)) if group["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, a / b))
        together = together.to(matrices[0].dtype) * (taken * scale)
        torch._foreach_sub_(matrices, list(together.unbind()))


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """(N, A, B) with singular values of about 1, in bfloat16, by Newton-Schulz iterations (Jordan et al. 2024)."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT.bfloat16() if tall else matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
