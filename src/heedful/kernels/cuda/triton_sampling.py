"""Triton kernels for the choice of the next tokens, and for the numbers of the next step.

B rows, V vocabulary, C parts of it
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def part_maxima(logits, tops, ids, V, C, PART: tl.constexpr, PDL: tl.constexpr):
    """The highest of PART logits and the lowest id that has it: tops and ids (B, C). NaN counts as the highest."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    tl.store(tops + row * C + part, tl.max(x, 0))
    tl.store(ids + row * C + part, part * PART + tl.argmax(x, 0))


@triton.jit
def choose_highest(tops, ids, numbers, chosen, B, C, C_PADDED: tl.constexpr, PDL: tl.constexpr):
    """The row's token from its parts: its id and logit to `chosen` (2, B), the next token and length to `numbers`."""
    row, c = tl.program_id(0), tl.arange(0, C_PADDED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(tops + row * C + c, mask=c < C, other=float("-inf"))
    token = tl.load(ids + row * C + tl.argmax(x, 0))
    tl.store(chosen + row, token.to(tl.float64))
    tl.store(chosen + B + row, tl.max(x, 0).to(tl.float64))
    tl.store(numbers + row, token)
    tl.store(numbers + B + row, tl.load(numbers + B + row) + 1)


@triton.jit
def draw_token(masses, uniforms, temperatures, numbers, chosen, V, BITS: tl.constexpr):
    """A random token of a row whose temperature is not 0, bit by bit as in kernels/sampling.py, from its cumulative
    masses (B, V) and uniform numbers (B, BITS): its id to `chosen` and `numbers`."""
    row = tl.program_id(0)
    if tl.load(temperatures + row) > 0:
        masses, uniforms = masses + row.to(tl.int64) * V, uniforms + row * BITS
        token, below, above = 0, 0.0 * tl.load(masses), tl.load(masses + V - 1)
        for i in tl.static_range(BITS):
            half = 1 << (BITS - 1 - i)
            middle = tl.load(masses + tl.minimum(token + half, V) - 1)
            higher = (above > middle) & (tl.load(uniforms + i) * (above - below) >= middle - below)
            token = tl.where(higher, token + half, token)
            below, above = tl.where(higher, middle, below), tl.where(higher, above, middle)
        tl.store(chosen + row, token.to(tl.float64))
        tl.store(numbers + row, token.to(tl.int64))
