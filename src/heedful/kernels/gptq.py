"""GPTQ (Frantar et al. 2022): a weight rounded to 4 bits so that the layer's outputs change least.

Over the inputs x of a text, the squared change of the outputs is the trace of (W - Ŵ) H (W - Ŵ)ᵀ with H = Σ x xᵀ. GPTQ
rounds one column after the other, and after each adds to the columns that are left what compensates its error best
(section 3.2), by the Cholesky factor of the inverse of H (section 3.3, step 3). Columns with the largest inputs go
first, while there are many left to compensate with.

The inputs x come from layers that are quantized already, so they differ from the inputs x₀ of the unquantized model.
What the layer should give is W x₀; the weight that comes nearest to that is W (Σ x₀ xᵀ) H⁻¹, and this one is rounded,
as in GPTAQ (Li et al. 2025).

Groups stay 32 neighbouring inputs, as the kernels have them, so their scales and zero points are chosen beforehand:
those of the least rounding error with each input weighed by its second moment (`best_grid`). At the end each group's
integers are chosen again, one column after the other, with all others as they are, and then its scale (coordinate
descent, as in QuantEase, Behdin et al. 2023): GPTQ's first columns were rounded without knowing the later ones' errors.

N outputs, K inputs, G inputs in a group
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels.quantize import GROUP, QuantizedWeight, best_grid, int4_weight, round_int4, round_precision

DAMPING = 0.05  # of the mean of the diagonal of H, added to it (section 3.3, step 3; there 0.01)
PASSES = 2  # of coordinate descent
BLOCK = 128  # columns whose updates of the later ones are one product (section 3.3, step 2)


def gptq(
    weight: Tensor, moments: Tensor, deviation: Tensor | None = None, *, damping: float = DAMPING
) -> QuantizedWeight:
    """The weight (N, K) in int4, given the second moments H = Σ x xᵀ (K, K) of its inputs and, if they are not those of
    the unquantized model, the moments of the `deviation` Σ (x₀ - x) xᵀ (K, K); K in whole groups."""
    weight, moments = weight.detach().float(), _damped(moments.double(), damping)
    if deviation is not None:
        weight = weight + torch.linalg.solve(moments, weight.double() @ deviation.double(), left=False).float()
    scale, zero_point = best_grid(weight, moments.diagonal().float())
    ints = compensated_integers(weight, moments, scale, zero_point)
    for _ in range(PASSES):
        ints, scale = descend(weight, moments.float(), ints, scale, zero_point)
    return int4_weight(ints, scale, zero_point)


def compensated_integers(weight: Tensor, moments: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Integers from -8 to 7 (N, K) for given scales and zero points (N, K/G), the error of each column compensated by
    those that come after it; `moments` (K, K) are positive definite."""
    n_inputs = weight.shape[1]
    order = moments.diagonal().argsort(descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    rest = weight[:, order].clone()  # what is left to round, with the errors so far compensated
    scale, zero_point = scale[:, order // GROUP], zero_point[:, order // GROUP]  # (N, K), of each column in this order
    ints = torch.empty_like(rest)
    for begin in range(0, n_inputs, BLOCK):
        end = min(begin + BLOCK, n_inputs)
        errors = torch.empty_like(rest[:, begin:end])
        for i in range(begin, end):
            ints[:, i] = round_int4(rest[:, i], scale[:, i], zero_point[:, i])
            error = rest[:, i] - (ints[:, i] - zero_point[:, i]) * scale[:, i]
            errors[:, i - begin] = error / factor[i, i]
            rest[:, i + 1 : end] -= errors[:, i - begin, None] * factor[i, i + 1 : end]
        rest[:, end:] -= errors @ factor[begin:end, end:]
    return ints[:, order.argsort()]


def descend(weight: Tensor, moments: Tensor, ints: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (N, K) and scales (N, K/G) of no more error than the given ones, by a pass of coordinate descent."""
    ints, scale = ints.clone(), scale.clone()
    steps = scale.repeat_interleave(GROUP, 1)
    gradient = (weight - (ints - zero_point.repeat_interleave(GROUP, 1)) * steps) @ moments  # (N, K), of the error
    for group in range(scale.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        inner, zero = moments[columns, columns], zero_point[:, group, None]
        step, local = scale[:, group, None], gradient[:, columns].clone()
        new = ints[:, columns].clone()
        old_weight = (new - zero) * step
        for i in range(GROUP):
            before = (new[:, i : i + 1] - zero) * step
            new[:, i : i + 1] = round_int4(before + local[:, i : i + 1] / inner[i, i], step, zero)
            local -= ((new[:, i : i + 1] - zero) * step - before) * inner[i]
        levels = new - zero  # (N, G)
        curvature = ((levels @ inner) * levels).sum(1, keepdim=True)
        slope = (levels * local).sum(1, keepdim=True)
        fitted = round_precision(step + slope / curvature.clamp_min(torch.finfo(torch.float32).tiny))
        change = fitted - step
        step = torch.where(2 * change * slope > change.square() * curvature, fitted, step)  # the error decreases
        ints[:, columns], scale[:, group] = new, step[:, 0]
        gradient -= (levels * step - old_weight) @ moments[columns]
    return ints, scale


def _damped(moments: Tensor, damping: float) -> Tensor:
    """The moments with a part of their mean diagonal added to it, so that they are positive definite."""
    mean = moments.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return moments + damping * mean * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
