"""Quantization of weights (N, K) to integers q with a scale per row or group.

quantize_rows          int8, w = q · scale per row                             ATen's kernel
quantize_groups_int8   int8, w = q · scale per group                           int8, embedding tables
quantize_groups_int4   4 bits, w = (q - 8) · scale + zero point, per group     int4

Groups and their scales in float16 are those of llama.cpp's Q8_0 and Q4_1: weights of such a file are kept exactly as
int8 and int4. With scales in bfloat16, which ATen's int4 kernels take, they are not.

N outputs, K inputs, G inputs in a group
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # group size: inputs that share a scale
TINY = {torch.float16: 2.0**-24, torch.bfloat16: 1e-30, torch.float32: 1e-30}  # smallest scale, for groups of zeros


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
        zero[rows] = (low + 8 * scale[rows].float()).to(dtype)
        rounded = (groups - zero[rows, :, None].float()) / scale[rows, :, None].float() + 8
        ints[rows] = rounded.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return ints, scale, zero


def _round_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.clamp_(TINY[dtype], torch.finfo(dtype).max).to(dtype)


def _slices(weight: Tensor) -> list[slice]:
    """Chunks of rows, to bound temporary memory."""
    return [slice(i, i + 1024) for i in range(0, len(weight), 1024)]
