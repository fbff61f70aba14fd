"""Weights (N, K) in few bits: which integers, and what they stand for.

rows     int8, w = q · scale, a scale for each output       tables of embeddings, ATen's kernel
evenly   int8, w = q · scale, a scale for each group        int8
groups   4 bits, w = (q - 8) · scale + middle, of a group   int4

N outputs, K inputs, G inputs in a group
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs that share a scale
TINY = 1e-30


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and the scale of each row: (N, K) -> (N, K), (N,)."""
    ints = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    for rows in _slices(weight):
        part = weight[rows].float()
        scales[rows] = part.abs().amax(dim=1).clamp_(min=TINY) / 127
        ints[rows] = (part / scales[rows, None]).round_().to(torch.int8)
    return ints, scales


def quantize_evenly(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (N, K) and the scale of each group in bfloat16 (N, K/G); the last group may be short."""
    n_groups = -(-weight.shape[1] // GROUP)
    ints = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(len(weight), n_groups, dtype=torch.bfloat16)
    for rows in _slices(weight):
        groups = F.pad(weight[rows].float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        scales[rows] = (groups.abs().amax(dim=2).clamp_(min=TINY) / 127).bfloat16()
        steps = (groups / scales[rows, :, None].float()).round_().clamp_(-127, 127)
        ints[rows] = steps.to(torch.int8).flatten(1)[:, : weight.shape[1]]
    return ints, scales


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """0 to 15 as uint8 (N, K), and each group's scale and middle in bfloat16 (N, K/G): w = (q - 8) · scale + middle."""
    steps = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.bfloat16)
    middle = torch.empty_like(scale)
    for rows in _slices(weight):
        groups = weight[rows].float().unflatten(1, (-1, GROUP))  # (n, K/G, G)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale[rows] = ((high - low) / 15).clamp_(min=TINY).bfloat16()
        middle[rows] = (low + 8 * scale[rows].float()).bfloat16()
        places = (groups - middle[rows, :, None].float()) / scale[rows, :, None].float() + 8
        steps[rows] = places.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return steps, scale, middle


def _slices(weight: Tensor) -> list[slice]:
    """Some rows at a time: what is needed on the way stays small."""
    return [slice(i, i + 1024) for i in range(0, len(weight), 1024)]
