"""The exercises of *Training a Transformer*."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_smoothed_loss(answer: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """The mean cross-entropy with a smoothed target, ε / V of it for every word."""
    logits, targets, eps = 2 * torch.randn(6, 9), torch.randint(9, (6,)), 0.2
    log_p = logits.log_softmax(dim=-1)
    right = -log_p.gather(1, targets[:, None])[:, 0]  # (6,)
    every = -log_p.mean(dim=-1)
    got = answer(logits, targets, eps)
    each = isinstance(got, Tensor) and tuple(got.shape) == (6,)
    require(not each, "it returns a loss for each row: the mean is asked for")
    got = require_tensor(got, ())
    others = -(log_p.sum(dim=-1) + right)  # of all words but the target
    losses = (1 - eps) * right + eps * every
    wrong = {
        "nothing is smoothed: where is eps?": right,
        "the others share eps among V - 1 words: here it is eps / V for every word, the target too": (1 - eps) * right
        + eps * others / 8,
        "the target's own share of eps is missing: it has 1 - eps + eps / V": (1 - eps) * right + eps * others / 9,
        "each word has eps, not eps / V: the target does not sum to 1": (1 - eps) * right + eps * 9 * every,
        "the two parts are swapped: the right word has 1 - eps": eps * right + (1 - eps) * every,
        "the right word keeps all of its target: it must have 1 - eps + eps / V": right + eps * every,
    }
    for message, other in wrong.items():
        require(not torch.allclose(got, other.mean(), atol=1e-4), message)
    require(not torch.allclose(got, -losses.mean(), atol=1e-4), "the sign is wrong: a loss is positive")
    require(not torch.allclose(got, losses.sum(), atol=1e-4), "it is the sum over rows: the mean is asked for")
    require_close(got, losses.mean(), "the loss is wrong")


def check_transformer_rate(answer: Callable[[int, int, int], Any]) -> None:
    """Rising to the peak at `warmup`, then falling with the root of the step."""
    d, warmup = 256, 400
    peak = (d * warmup) ** -0.5

    def rate(step: int) -> float:
        got = answer(step, d, warmup)
        require(got is not None, "it returned None: is there a `return`?")
        return float(got)

    def same(value: float, other: float) -> bool:
        return abs(value - other) < 1e-4 * other

    top, early, late = rate(warmup), rate(100), rate(1600)
    require(not same(top, warmup**-0.5), "the factor d^-0.5 is missing")
    require(not same(top, d**0.5 * warmup**-0.5), "d has the exponent +0.5: larger models have smaller rates")
    require(not same(early, d**-0.5 * 100**-0.5), "it takes the larger term: min, not max; the rate begins small")
    require(not same(early, peak), "there is no warm-up: before the peak the rate rises with the step")
    require(not same(late, 4 * peak), "it rises for ever: after the peak the rate falls with the root of the step")
    require(not same(late, peak), "it stays at the peak: after it the rate falls with the root of the step")
    require(not same(late, peak / 4), "it falls with the step, not with its root")
    for step in (1, 100, 400, 1600):
        expected = peak * min(step / warmup, (warmup / step) ** 0.5)
        got = rate(step)
        require(same(got, expected), f"at step {step} of d {d}, warmup {warmup} it is {got:.3g}, not {expected:.3g}")
