"""Keys and values of a KV cache in 8 bits: half the memory of 16 bits, plus a scale per position and head.

The D numbers of one position and head are stored as D int8 codes and, in two more bytes, a bfloat16 scale:

    x = code · scale,    scale = max|x| / 127

Keys have a few channels much larger than the others (Liu et al. 2024, "KIVI"), which would take nearly all of the
scale. KIVI gives each channel of several positions a scale; here each position is quantized on its own, so that what
is cached does not depend on how a prompt is chunked. Instead keys are first rotated by a Hadamard matrix, which
spreads a large channel over all (Ashkboos et al. 2024, "QuaRot"): on SmolLM2-135M that halves the error of the
log-probabilities. The rotation is undone when keys are read; a kernel may rotate the queries instead.

    B rows, G key/value heads, S positions, D head size
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

CacheType = Literal["int8"]
SCALE_BYTES = 2  # a bfloat16
LARGEST = 127


def check_cache_type(kind: str) -> None:
    """ValueError for a type that keys and values cannot be stored in."""
    if kind not in get_args(CacheType):
        raise ValueError(f"a KV cache is stored as {', '.join(get_args(CacheType))}, not as {kind}")


def cache_bytes(d_head: int, kind: CacheType | None, itemsize: int = 4) -> int:
    """Bytes of the key, or of the value, of one position and head; `itemsize` is that of the activations."""
    return d_head * itemsize if kind is None else d_head + SCALE_BYTES


def store_keys_values(k: Tensor, v: Tensor, kind: CacheType | None) -> tuple[Tensor, Tensor]:
    """Keys and values (..., D) as they are cached: unchanged, or in int8 each (..., D + 2), codes and scale."""
    return (k, v) if kind is None else (_quantize(_rotate(k.float())), _quantize(v.float()))


def restore_keys_values(k: Tensor, v: Tensor, kind: CacheType | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cached keys and values as (..., D) of this type."""
    return (k, v) if kind is None else (_rotate(_dequantize(k)).to(dtype), _dequantize(v).to(dtype))


def empty_cache(n_heads: int, size: int, kind: CacheType | None) -> Tensor:
    """A tensor of no cached keys or values, (0, G, 0, D), of the type and width in which they are stored."""
    if kind is None:
        return torch.empty(0, n_heads, 0, size)
    return torch.empty(0, n_heads, 0, size + SCALE_BYTES, dtype=torch.int8)


def _quantize(x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
    inverse = scale.float().reciprocal()
    codes = (x * torch.where(scale == 0, 0, inverse)).round().clamp(-LARGEST, LARGEST)
    codes = codes.nan_to_num(0)  # the scale has NaN and infinity
    return torch.cat([codes.to(torch.int8), scale.view(torch.int8)], dim=-1)


def _dequantize(stored: Tensor) -> Tensor:
    codes, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return codes.float() * scale.float()


def _rotate(x: Tensor) -> Tensor:
    """x (..., D) times an orthogonal, symmetric matrix: its own inverse."""
    size = x.shape[-1] & -x.shape[-1]  # the largest power of two that divides D
    return (x.unflatten(-1, (-1, size)) @ hadamard_matrix(size, x.device)).flatten(-2)


@cache
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of a power of two, scaled to be orthogonal: (size, size)."""
    with torch.inference_mode(False):  # it is kept for passes with gradients too
        matrix = torch.ones(1, 1, device=device)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix / size**0.5
