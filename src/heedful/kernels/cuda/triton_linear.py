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
def _group_values(values, n, start, N, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scale or zero point of each group of a tile, (BLOCK_N, groups, 1) in float32: one load for 32 weights."""
    group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
    there = (n[:, None] < N) & (group[None, :] < K // GROUP)
    value = tl.load(values + n[:, None] * (K // GROUP) + group[None, :], mask=there, other=0.0)
    return value.to(tl.float32)[:, :, None]


@triton.jit
def _weight_tile(weight, scales, zeros, n, start, N, K: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr):  # fmt: skip
    """W[n, start : start + BLOCK_K] in float32, or in its own type if it is a float; 0 beyond N and K."""
    if BITS == 4:
        pair = start // 2 + tl.arange(0, BLOCK_K // 2)
        there = (n[:, None] < N) & (pair[None, :] < K // 2)
        pairs = tl.load(weight + n[:, None] * (K // 2) + pair[None, :], mask=there, other=0)
        tile = tl.interleave(pairs & 15, pairs >> 4)  # (BLOCK_N, BLOCK_K)
    else:
        k = start + tl.arange(0, BLOCK_K)
        there = (n[:, None] < N) & (k[None, :] < K)
        tile = tl.load(weight + n[:, None] * K + k[None, :], mask=there, other=0)
    if BITS < 16:
        groups = tl.reshape(tile.to(tl.float32), [BLOCK_N, BLOCK_K // GROUP, GROUP])
        scale = _group_values(scales, n, start, N, K, BLOCK_K)
        if BITS == 4:
            groups = (groups - 8.0) * scale + _group_values(zeros, n, start, N, K, BLOCK_K)
        else:
            groups = groups * scale
        tile = tl.reshape(groups, [BLOCK_N, BLOCK_K])
    return tile


@triton.jit
def vector_linear(
    x, weight, scales, zeros, bias, norm_weight, norm_bias, out, N, eps,
    K: tl.constexpr, K_PADDED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: out (N,) from x (K,). With GATED the weights are those of the gate, then of what it multiplies."""
    n, last = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), 2 * N if GATED else N
    tile = _weight_tile(weight, scales, zeros, n, 0, last, K, BITS, BLOCK_N, BLOCK_K)
    if GATED:
        other_tile = _weight_tile(weight, scales, zeros, n + N, 0, last, K, BITS, BLOCK_N, BLOCK_K)
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
            tile = _weight_tile(weight, scales, zeros, n, start, last, K, BITS, BLOCK_N, BLOCK_K)
            if GATED:
                other_tile = _weight_tile(weight, scales, zeros, n + N, start, last, K, BITS, BLOCK_N, BLOCK_K)
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
    n, last = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), 2 * N if GATED else N
    m = tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    gates = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        xs = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0).to(DOT)
        tile = _weight_tile(weight, scales, zeros, n, start, last, K, BITS, BLOCK_N, BLOCK_K).to(DOT)
        sums = tl.dot(xs, tl.trans(tile), sums, input_precision="ieee")
        if GATED:
            tile = _weight_tile(weight, scales, zeros, n + N, start, last, K, BITS, BLOCK_N, BLOCK_K).to(DOT)
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
