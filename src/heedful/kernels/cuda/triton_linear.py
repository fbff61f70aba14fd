"""Triton kernels for a linear layer of a few rows, with what stands before and after it: out = act(norm(x) Wᵀ + b),
gated, or added to the residual stream.

A decode step reads every weight once and does next to nothing with it, so a layer costs its bytes and its launches. One
row is multiplied without tensor cores, more rows with them. With PDL (programmatic dependent launch, Hopper) a kernel
starts while the one before it still runs, and fetches its first weights before it waits for that one's results. x is
float32 or the weights' type; sums are float32. Weights are float, int8 with a float16 scale per group of 32 inputs, or
4 bits, two per byte, with a scale and a zero point per group.

    M rows, K inputs, N outputs
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GROUP: tl.constexpr = tl.constexpr(32)  # kernels/quantize.py


@triton.jit
def _activate(x, ACT: tl.constexpr):
    if ACT == "relu":
        x = tl.maximum(x, 0.0)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif ACT == "silu":
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def _weight_tile(weight, scales, zeros, n, k, valid, K: tl.constexpr, BITS: tl.constexpr):
    """W[n, k] in float32, or in its own type if it is a float."""
    if BITS == 16:
        tile = tl.load(weight + n[:, None] * K + k[None, :], mask=valid, other=0.0)
    elif BITS == 8:
        scale = tl.load(scales + n[:, None] * (K // GROUP) + k[None, :] // GROUP, mask=valid, other=0.0)
        tile = tl.load(weight + n[:, None] * K + k[None, :], mask=valid, other=0).to(tl.float32) * scale.to(tl.float32)
    else:
        group = n[:, None] * (K // GROUP) + k[None, :] // GROUP
        scale, zero = tl.load(scales + group, mask=valid, other=0.0), tl.load(zeros + group, mask=valid, other=0.0)
        pair = tl.load(weight + n[:, None] * (K // 2) + k[None, :] // 2, mask=valid, other=0)
        ints = ((pair >> ((k[None, :] % 2) * 4).to(tl.uint8)) & 15).to(tl.float32) - 8.0
        tile = ints * scale.to(tl.float32) + zero.to(tl.float32)
    return tile


@triton.jit
def vector_linear(
    x, weight, scales, zeros, bias, norm_weight, norm_bias, out, N, eps,
    K: tl.constexpr, K_PADDED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: out (N,) from x (K,). With GATED the weights are those of the gate, then of what it multiplies."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    valid = (n[:, None] < N) & (k[None, :] < K)
    tile = _weight_tile(weight, scales, zeros, n, k, valid, K, BITS)
    if GATED:
        other_tile = _weight_tile(weight, scales, zeros, n + N, k, valid, K, BITS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mean, inverse = 0.0, 1.0
    if NORM != "none":
        every = tl.arange(0, K_PADDED)
        whole = tl.load(x + every, mask=every < K, other=0.0).to(tl.float32)
        if NORM == "layer":
            mean = tl.sum(whole, 0) / K
        centered = tl.where(every < K, whole - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(centered * centered, 0) / K + eps)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if start > 0:
            valid = (n[:, None] < N) & (k[None, :] < K)
            tile = _weight_tile(weight, scales, zeros, n, k, valid, K, BITS)
            if GATED:
                other_tile = _weight_tile(weight, scales, zeros, n + N, k, valid, K, BITS)
        if NORM != "none" and K_PADDED == BLOCK_K:
            xs = whole
        else:
            xs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM != "none":
            xs = (xs - mean) * inverse * (tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32) + OFFSET)
            if NORM_BIAS:
                xs += tl.load(norm_bias + k, mask=k < K, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * xs[None, :]
        if GATED:
            gates += other_tile.to(tl.float32) * xs[None, :]
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    total = _activate(total, ACT)
    if GATED:
        other = tl.sum(gates, 1)
        if HAS_BIAS:
            other += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        total = total * other
    if RESIDUAL:
        total += tl.load(out + n, mask=n < N, other=0.0)
    tl.store(out + n, total, mask=n < N)


@triton.jit
def rows_linear(
    x, weight, scales, zeros, bias, out, M, N,
    K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BITS: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some rows, at most ROWS: out (M, N) from x (M, K), by tensor cores in the type DOT."""
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    gates = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        valid = (n[:, None] < N) & (k[None, :] < K)
        xs = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0).to(DOT)
        tile = _weight_tile(weight, scales, zeros, n, k, valid, K, BITS).to(DOT)
        sums = tl.dot(xs, tl.trans(tile), sums, input_precision="ieee")
        if GATED:
            tile = _weight_tile(weight, scales, zeros, n + N, k, valid, K, BITS).to(DOT)
            gates = tl.dot(xs, tl.trans(tile), gates, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    sums = _activate(sums, ACT)
    if GATED:
        if HAS_BIAS:
            gates += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        sums = sums * gates
    at, there = m[:, None] * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    if RESIDUAL:
        sums += tl.load(out + at, mask=there, other=0.0)
    tl.store(out + at, sums, mask=there)


@triton.jit
def norm_rows(
    x, norm_weight, norm_bias, out, eps,
    K: tl.constexpr, K_PADDED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (M, K) = norm(x), or out + norm(x): one program per row."""
    k, row = tl.arange(0, K_PADDED), tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM == "layer":
        xs = xs - tl.sum(xs, 0) / K
    xs = tl.where(k < K, xs, 0.0)
    scale = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32) + OFFSET
    xs = xs * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps) * scale
    if NORM_BIAS:
        xs += tl.load(norm_bias + k, mask=k < K, other=0.0).to(tl.float32)
    if RESIDUAL:
        xs += tl.load(out + row * K + k, mask=k < K, other=0.0)
    tl.store(out + row * K + k, xs, mask=k < K)
