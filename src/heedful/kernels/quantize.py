"""Quantization of weights (N, K) to integers q with a scale per row or group.

quantize_rows          int8, w = q · scale per row                             ATen's kernel
quantize_groups_int8   int8, w = q · scale per group                           int8, embedding tables
quantize_groups_int4   4 bits, w = (q - 8) · scale + zero point, per group     int4
best_scales            4 bits, w = q · scale per group, q from -8 to 7         int4 in files
best_grid              4 bits, w = (q - zero point) · scale, both -8 to 7      GPTQ, int4 in files

Groups and their scales in float16 are those of llama.cpp's Q8_0 and Q4_1: weights of such a file are kept exactly as
int8 and int4. With scales in bfloat16, which ATen's int4 kernels take, they are not.

A `QuantizedWeight` is such a form as one object. A parameter can keep the one that it was loaded with, or that
calibration found: kernels and files then take its integers as they are instead of rounding again.

N outputs, K inputs, G inputs in a group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # group size: inputs that share a scale
# Where the largest weight of a group may be put by `best_scales`: a little inside and outside of the integers -8 to 7,
# which reach further below, so that the scale may be negative.
PLACES_OF_LARGEST = [-8 + i / 4 for i in range(-3, 9)] + [7 + i / 2 for i in range(-2, 3)]
PARTS_OF_RANGE = [1 - i / 40 for i in range(20)]  # of a group that `best_grid` may cover: the rest is clipped
TINY = {torch.float16: 2.0**-24, torch.bfloat16: 1e-30, torch.float32: 1e-30}  # smallest scale, for groups of zeros


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in integers: w = ints · scale (int8), or (ints - 8) · scale + zero (int4), per group of 32 inputs."""

    ints: Tensor  # (N, K); int8 from -127 to 127, or uint8 from 0 to 15
    scale: Tensor  # (N, K/G), float16
    zero: Tensor | None = None  # (N, K/G), float16: the zero point of int4

    @property
    def precision(self) -> Literal["int8", "int4"]:
        """Which of the two it is."""
        return "int8" if self.zero is None else "int4"

    def dequantize(self) -> Tensor:
        """The weight (N, K) in float32."""
        groups = F.pad(self.ints.float(), (0, -self.ints.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        scale = self.scale.float().unsqueeze(2)
        weight = groups * scale if self.zero is None else (groups - 8) * scale + self.zero.float().unsqueeze(2)
        return weight.flatten(1)[:, : self.ints.shape[1]]

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """A function applied to each tensor: rows selected or reordered, or moved to a device."""
        zero = None if self.zero is None else function(self.zero)
        return QuantizedWeight(function(self.ints), function(self.scale), zero)

    @staticmethod
    def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Weights with the same inputs as one, of all their outputs; all are of the same precision."""
        zeros = [part.zero for part in parts if part.zero is not None]
        assert len(zeros) in (0, len(parts)), "int8 and int4 cannot be concatenated"
        ints, scale = torch.cat([part.ints for part in parts]), torch.cat([part.scale for part in parts])
        return QuantizedWeight(ints, scale, torch.cat(zeros) if zeros else None)


def quantize_weight(weight: Tensor, precision: Literal["int8", "int4"]) -> QuantizedWeight:
    """The integers that the weight keeps, if they are of this precision; otherwise the nearest."""
    if (kept := kept_integers(weight, precision)) is not None:
        return kept
    weight = weight.detach()
    return QuantizedWeight(*(quantize_groups_int8(weight) if precision == "int8" else quantize_groups_int4(weight)))


def keep_integers(weight: Tensor, quantized: QuantizedWeight) -> None:
    """Let a parameter keep the integers that it is the dequantized form of."""
    weight.quantized = quantized  # type: ignore[attr-defined]


def kept_integers(weight: Tensor, precision: str) -> QuantizedWeight | None:
    """The integers of this precision that a parameter keeps; None if it has none, or has changed since."""
    quantized = getattr(weight, "quantized", None)
    if not isinstance(quantized, QuantizedWeight) or quantized.precision != precision:
        return None
    unchanged = torch.equal(quantized.dequantize().to(weight), weight.detach())
    return quantized if unchanged else None


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: (N, K) -> integers (N, K) and scales (N,) in float32."""
    ints = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    for rows in _slices(weight):
        part = weight[rows].float()
        scales[rows] = _round_scales(part.abs().amax(dim=1) / 127, torch.float32)
        ints[rows] = (part / scales[rows, None]).round_().to(torch.int8)
    return ints, scales


def quantize_groups_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per group: integers (N, K) and scales (N, K/G) in float16; the last group may be shorter."""
    n_groups = -(-weight.shape[1] // GROUP)
    ints = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(len(weight), n_groups, dtype=torch.float16)
    for rows in _slices(weight):
        groups = F.pad(weight[rows].float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        scales[rows] = _round_scales(groups.abs().amax(dim=2) / 127, torch.float16)
        rounded = (groups / scales[rows, :, None].float()).round_().clamp_(-127, 127)
        ints[rows] = rounded.to(torch.int8).flatten(1)[:, : weight.shape[1]]
    return ints, scales


def quantize_groups_int4(weight: Tensor, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric 4 bits per group: w = (q - 8) · scale + zero point.

    Integers 0 to 15 (N, K) in uint8, scales and zero points (N, K/G) in `dtype`.
    """
    ints = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=dtype)
    zero = torch.empty_like(scale)
    for rows in _slices(weight):
        groups = weight[rows].float().unflatten(1, (-1, GROUP))  # (n, K/G, G)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale[rows] = _round_scales((high - low) / 15, dtype)
        # Q4_1 stores zero - 8 · scale, the least weight in the same type: rounded first, it gives the zero point back.
        zero[rows] = (low.to(dtype).float() + 8 * scale[rows].float()).to(dtype)
        rounded = (groups - zero[rows, :, None].float()) / scale[rows, :, None].float() + 8
        ints[rows] = rounded.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return ints, scale, zero


def best_scales(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """The scales (N, K/G) of the symmetric 4-bit grid of the least squared error among some, each input weighed by its
    `importance` (K,). In float16, or bfloat16 where that is too narrow.

    The largest of a group is put at or near -8, where the scale has the other sign, or 7. The integers that follow
    have a best scale, which is tried too.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))  # (N, K/G, G)
    weights = 1.0 if importance is None else importance.unflatten(0, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    dtype = torch.float16 if 2**-10 < largest.abs().max() < 2**18 else torch.bfloat16  # where float16 is fine enough
    least = torch.full_like(largest, torch.inf)
    scales = torch.ones_like(largest, dtype=dtype)
    for place in PLACES_OF_LARGEST:
        scale = (largest / place).to(dtype)
        for _ in range(2):
            ints = round_int4(groups, scale.float())
            error = ((ints * scale.float() - groups).square_() * weights).sum(2, keepdim=True)
            better = error < least
            least, scales = torch.where(better, error, least), torch.where(better, scale, scales)
            weighed = ints * weights
            best = (weighed * groups).sum(2, keepdim=True) / (weighed * ints).sum(2, keepdim=True).clamp_min(1e-30)
            scale = best.to(dtype)
    return scales.squeeze(2)


def best_grid(weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and zero points, integers from -8 to 7, (N, K/G) of the least squared error with each input weighed by
    its `importance` (K,), among grids that cover a group's range, or a part of it.

    Scales have 7 bits of precision, so that float16 has all their multiples up to 15: compressed-tensors, Q4_1 and the
    kernels, which store other numbers of a grid, then have the same weight of it, exactly.
    """
    groups = weight.unflatten(1, (-1, GROUP))  # (N, K/G, G)
    weights = importance.unflatten(0, (-1, GROUP))
    low, high = groups.amin(2, keepdim=True).clamp_max(0), groups.amax(2, keepdim=True).clamp_min(0)
    least = torch.full_like(low, torch.inf)
    scales, zero_points = torch.ones_like(low), torch.zeros_like(low)
    for part in PARTS_OF_RANGE:
        scale = round_precision((high - low) * (part / 15))
        nearest = (-low * part / scale).round_() - 8
        for zero_point in (nearest - 1, nearest, nearest + 1):
            zero_point = zero_point.clamp(-8, 7)
            rounded = (round_int4(groups, scale, zero_point) - zero_point) * scale
            error = ((rounded - groups).square_() * weights).sum(2, keepdim=True)
            better = error < least
            least, scales = torch.where(better, error, least), torch.where(better, scale, scales)
            zero_points = torch.where(better, zero_point, zero_points)
    return scales.squeeze(2), zero_points.squeeze(2)


def round_precision(scales: Tensor) -> Tensor:
    """Positive numbers rounded to 7 bits of precision, and to a range such that 15 times each is a float16."""
    fraction, exponent = torch.frexp(scales.clamp(TINY[torch.float16], torch.finfo(torch.float16).max / 16))
    return torch.ldexp((fraction * 2**7).round_() / 2**7, exponent).half().float()  # of the least it has fewer bits


def round_int4(weight: Tensor, scale: Tensor, zero_point: Tensor | float = 0.0) -> Tensor:
    """weight / scale + zero point, rounded to the integers from -8 to 7."""
    return (weight / torch.where(scale == 0, torch.ones_like(scale), scale) + zero_point).round_().clamp_(-8, 7)


def int4_weight(ints: Tensor, scale: Tensor, zero_point: Tensor) -> QuantizedWeight:
    """The weight w = (ints - zero point) · scale of integers from -8 to 7 (N, K), scales and zero points (N, K/G)."""
    return QuantizedWeight((ints + 8).to(torch.uint8), scale.half(), (-zero_point * scale.float()).half())


def _round_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.clamp_(TINY[dtype], torch.finfo(dtype).max).to(dtype)


def _slices(weight: Tensor) -> list[slice]:
    """Chunks of rows, to bound temporary memory."""
    return [slice(i, i + 1024) for i in range(0, len(weight), 1024)]
