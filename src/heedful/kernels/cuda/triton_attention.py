"""A Triton kernel for the attention of one new token per row to a paged KV cache (Kwon et al. 2023), rotary positions,
query and key norms included; it writes the new keys and values to their blocks.

A long cache is divided among SPLITS programs (Dao et al. 2023, "Flash-Decoding"); the one that ends last adds up their
results, always in the same order.

    B rows, H query heads, G key/value heads, D head size, N blocks of P positions, W blocks in a table
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rotated(x, at, cos, sin, d, norm, eps, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
             NORM: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The queries or keys at x + at (n, D), normalized and rotated, rounded as they are stored."""
    value = tl.load(x + at, mask=d < D, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value = value * inverse * tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        value = value.to(DTYPE).to(tl.float32)
    if HALF > 0:
        turned = d < 2 * HALF
        if INTERLEAVED:
            partner, pair, sign = d ^ 1, d // 2, tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner, pair = tl.where(d < HALF, d + HALF, d - HALF), d % HALF
            sign = tl.where(d < HALF, -1.0, 1.0)
        other = tl.load(x + at - d + partner, mask=turned, other=0.0).to(tl.float32)
        if NORM:
            other = other * inverse * tl.load(norm + partner, mask=turned, other=0.0).to(tl.float32)
            other = other.to(DTYPE).to(tl.float32)
        c = tl.load(cos + pair, mask=turned, other=1.0).to(DTYPE).to(tl.float32)
        s = tl.load(sin + pair, mask=turned, other=0.0).to(DTYPE).to(tl.float32)
        value = tl.where(turned, value * c + sign * other * s, value)
    return value.to(DTYPE)


@triton.jit
def _scaled(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores times the scale, with Gemma 2's soft cap where there is one."""
    scores = scores * scale
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _cached(keys, values, tables, start, end, g, d, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
            BLOCK_S: tl.constexpr):  # fmt: skip
    """Keys and values (S, D) of the cached positions from start on, 0 at the end and after it."""
    s = start + tl.arange(0, BLOCK_S)
    block = tl.load(tables + s // P, mask=s < end, other=0).to(tl.int64)
    at = (((block * G + g) * P + s % P) * D)[:, None] + d[None, :]
    inside = (s < end)[:, None] & (d < D)[None, :]
    return tl.load(keys + at, mask=inside, other=0.0), tl.load(values + at, mask=inside, other=0.0)


@triton.jit
def _with_one(highest, total, sums, score, v):
    """The running softmax with one more key of this score (GROUPS,) and value (1, D)."""
    higher = tl.maximum(highest, score)
    share, fade = tl.exp(score - higher), tl.exp(highest - higher)
    return higher, total * fade + share, sums * fade[:, None] + share[:, None] * v.to(tl.float32)


@triton.jit
def _window(length, split, window, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The cached positions that this program attends to, from the first to before the last."""
    first = tl.maximum(length + 1 - window, 0)
    each = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_S) * BLOCK_S
    return first + split * each, tl.minimum(first + (split + 1) * each, length)


@triton.jit
def _added_up(parts, maxima, totals, part, real, there, d, D: tl.constexpr, D_PADDED: tl.constexpr,
              GROUPS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """The result (GROUPS, D) of the parts of all programs, which begin at `part`."""
    highest = tl.full([GROUPS], float("-inf"), tl.float32)
    for i in tl.static_range(SPLITS):
        highest = tl.maximum(highest, tl.load(maxima + part + i, mask=real, other=0.0, cache_modifier=".cg"))
    total, sums = tl.zeros([GROUPS], tl.float32), tl.zeros([GROUPS, D_PADDED], tl.float32)
    for i in tl.static_range(SPLITS):
        share = tl.exp(tl.load(maxima + part + i, mask=real, other=0.0, cache_modifier=".cg") - highest)
        total += share * tl.load(totals + part + i, mask=real, other=1.0, cache_modifier=".cg")
        at = (part + i)[:, None] * D + d[None, :]
        sums += share[:, None] * tl.load(parts + at, mask=there, other=0.0, cache_modifier=".cg")
    return sums / total[:, None]


@triton.jit
def paged_attention(
    qkv, keys, values, tables, lengths, cos, sin, query_norm, key_norm, out, parts, maxima, totals, arrived,
    scale, softcap, eps, window, W,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (B, H, D) from the projections qkv (B, (H + 2 G) D); parts (B, H, SPLITS, D), maxima and totals, and
    arrived (B, G), which is 0, are for SPLITS > 1. GROUPS is H / G as a power of two, 16 at least, for tensor cores."""
    row, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    DTYPE: tl.constexpr = keys.dtype.element_ty
    length = tl.load(lengths + row)  # cached positions; the new token is at this one
    tables, qkv = tables + row * W, qkv + row * (H + 2 * G) * D
    h, d = tl.arange(0, GROUPS), tl.arange(0, D_PADDED)
    begin, end = _window(length, split, window, SPLITS, BLOCK_S)
    # What is cached was written by earlier steps: the first of it is fetched before the projections are there.
    k, v = _cached(keys, values, tables, begin, end, g, d, G, D, P, BLOCK_S)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if HALF > 0:
        cos, sin = cos + length * HALF, sin + length * HALF
    real = h < H // G
    heads = g * (H // G) + tl.where(real, h, 0)
    at_q = heads[:, None] * D + d[None, :]  # (GROUPS, D)
    q = _rotated(qkv, at_q, cos, sin, d[None, :], query_norm, eps, D, HALF, INTERLEAVED, NORM, DTYPE)
    highest, total = tl.full([GROUPS], float("-inf"), tl.float32), tl.zeros([GROUPS], tl.float32)
    sums = tl.zeros([GROUPS, D_PADDED], tl.float32)
    for start in range(begin, end, BLOCK_S):
        scores = _scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAP)  # (GROUPS, S)
        scores = tl.where((start + tl.arange(0, BLOCK_S) < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares, fade = tl.exp(scores - higher[:, None]), tl.exp(highest - higher)
        total = total * fade + tl.sum(shares, 1)
        sums = tl.dot(shares.to(DTYPE), v, sums * fade[:, None], input_precision="ieee")
        highest = higher
        if start + BLOCK_S < end:
            k, v = _cached(keys, values, tables, start + BLOCK_S, end, g, d, G, D, P, BLOCK_S)
    if split == SPLITS - 1:  # the new token itself, which no program can expect to find in the cache
        at = ((tl.load(tables + length // P).to(tl.int64) * G + g) * P + length % P) * D + d[None, :]
        at_k, inside = ((H + g) * D + d)[None, :], d[None, :] < D
        new_k = _rotated(qkv, at_k, cos, sin, d[None, :], key_norm, eps, D, HALF, INTERLEAVED, NORM, DTYPE)  # (1, D)
        new_v = tl.load(qkv + at_k + G * D, mask=inside, other=0.0).to(DTYPE)
        tl.store(keys + at, new_k, mask=inside)
        tl.store(values + at, new_v, mask=inside)
        own = _scaled(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1), scale, softcap, SOFTCAP)
        highest, total, sums = _with_one(highest, total, sums, own, new_v)
    there = real[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        tl.store(out + row * H * D + at_q, sums / total[:, None], mask=there)
        return
    part = (row * H + heads) * SPLITS
    tl.store(parts + (part + split)[:, None] * D + d[None, :], sums, mask=there)
    tl.store(maxima + part + split, highest, mask=real)
    tl.store(totals + part + split, total, mask=real)
    tl.debug_barrier()  # all of it is stored before it is counted
    if tl.atomic_add(arrived + row * G + g, 1, sem="acq_rel") == SPLITS - 1:
        sums = _added_up(parts, maxima, totals, part, real, there, d, D, D_PADDED, GROUPS, SPLITS)
        tl.store(out + row * H * D + at_q, sums, mask=there)
        tl.store(arrived + row * G + g, 0)
