"""Attention of a single query per row over cached keys and values, by a C kernel.

B rows, H heads, G key/value heads, S keys, D head size
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from heedful.kernels.cpu.library import library, pointer
from heedful.kernels.cpu.ops import is_traced, register


def supports_single_query(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `single_query_attention` supports these: one query per row, float32 on a CPU, no gradients."""
    return (
        q.shape[2] == 1
        and q.dtype == k.dtype == v.dtype == torch.float32
        and q.shape[3] % 16 == 0
        and v.shape[3] == q.shape[3]
        and not torch.is_grad_enabled()
        and q.device.type == "cpu"
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and library() is not None
    )


def single_query_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float | None
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v for q (B, H, 1, D), k and v (B, G, S, D) -> (B, H, 1, D).

    mask (B or 1, 1, 1, S) is True where attention is allowed; bias (B or 1, H or 1, 1, S); scale D^-0.5 if None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if is_traced(q):
        out: Tensor = torch.ops.heedful.single_query_attention(q, k, v, mask, bias, scale)
        return out
    return _attend(q, k, v, mask, bias, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    (n_rows, n_heads, _, size), (n_groups, n_keys) = q.shape, k.shape[1:3]
    mask, bias = (None if t is None else t.contiguous() for t in (mask, bias))
    out, scores = q.new_empty(n_rows, 1, n_heads, size), q.new_empty(n_rows, n_heads, n_keys)
    strides = [*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]]
    strides.append(0 if mask is None or len(mask) == 1 else mask.stride(0))
    strides += [0, 0] if bias is None else [bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1)]
    lib = library()
    assert lib is not None
    lib.single_query_attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer(mask), pointer(bias), out.data_ptr(), scores.data_ptr(),
        n_rows, n_heads, n_groups, n_keys, size, (ctypes.c_int64 * 11)(*strides), scale, torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(1, 2)  # (B, H, 1, D)


def _attend_shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    n_rows, n_heads, _, size = q.shape
    return q.new_empty(n_rows, 1, n_heads, size).transpose(1, 2)


register(
    "single_query_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, float scale) -> Tensor",
    _attend,
    _attend_shape,
)


@register_flop_formula(torch.ops.heedful.single_query_attention)
def _attend_flops(q: list[int], k: list[int], *given: Any, **_: Any) -> int:
    return 4 * math.prod(q) * k[2]
