"""A Triton kernel for cross-entropy and its gradient: logits are read twice, the second time mostly from the L2 cache,
and their gradient is written in their place.

    C rows, V vocabulary, W its padded width
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _capped(x, softcap, SOFTCAP: tl.constexpr):
    """Logits after Gemma 2's soft cap, where there is one, and its derivative."""
    x, slope = x.to(tl.float32), 1.0
    if SOFTCAP:
        squashed = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0  # tanh
        x, slope = squashed * softcap, 1.0 - squashed * squashed
    return x, slope


@triton.jit
def cross_entropy_rows(
    logits, targets, losses, V, W, softcap, smoothing, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """losses (C,) of the first V of logits (C, W), which become their gradient; 0 beyond V. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    logits, target, v = logits + row * W, tl.load(targets + row), tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)  # of each lane, so that a row is reduced once
    total, whole = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x, _ = _capped(tl.load(logits + start + v, mask=inside, other=0.0), softcap, SOFTCAP)
        higher = tl.maximum(highest, tl.where(inside, x, float("-inf")))
        kept = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - higher))
        total = total * kept + tl.where(inside & (x != float("-inf")), tl.exp(x - higher), 0.0)
        highest = higher
        if SMOOTHING:
            whole += tl.where(inside, x, 0.0)
    top = tl.max(highest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    own, _ = _capped(tl.load(logits + target), softcap, SOFTCAP)
    loss = (1.0 - smoothing) * (log_sum - own)
    if SMOOTHING:
        loss += smoothing * (log_sum - tl.sum(whole, 0) / V)
    tl.store(losses + row, loss)
    for start in range(0, W, BLOCK):
        at = start + v
        x, slope = _capped(tl.load(logits + at, mask=at < V, other=0.0), softcap, SOFTCAP)
        d = tl.exp(x - log_sum) - smoothing / V - tl.where(at == target, 1.0 - smoothing, 0.0)
        tl.store(logits + at, tl.where(at < V, d * slope, 0.0), mask=at < W)
