"""The exercises of *Training to translate*."""

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


def check_extend_beams(answer: Callable[[Tensor, Tensor, int], Any]) -> None:
    """The best of all extensions, whichever beginning they extend."""
    totals = torch.tensor([-1.0, -1.5, -6.0])
    log_p = torch.tensor(
        [
            [0.3, 0.1, 0.25, 0.2, 0.15],
            [0.02, 0.9, 0.03, 0.04, 0.01],
            [0.01, 0.01, 0.01, 0.96, 0.01],
        ]
    ).log()
    found = answer(totals, log_p, 3)
    require(found is not None, "it returned None: is there a `return`?")
    require(isinstance(found, tuple | list) and len(found) == 3, "three tensors are asked for: totals, rows, tokens")
    best, rows, tokens = (
        require_tensor(x, (3,), name) for x, name in zip(found, ("totals", "rows", "tokens"), strict=True)
    )
    chosen = list(zip(rows.tolist(), tokens.tolist(), strict=True))
    require(tokens.tolist() != [6, 0, 2], "the tokens are places among all W·V: take the rest mod V")
    without = [(2, 3), (1, 1), (0, 0)]
    require(chosen != without, "the totals of the beginnings have no part: add them first")
    require(
        sorted(chosen) != [(0, 0), (1, 1), (2, 3)],
        "each beginning has one extension: the best of all are asked for, and one beginning may have several",
    )
    require(not bool((best > 0).any()), "a total is positive: log-probabilities are added, not multiplied")
    right = [(1, 1), (0, 0), (0, 2)]
    swapped = [(token, row) for row, token in right]
    require(chosen != swapped, "rows and tokens are swapped: totals, rows, tokens")
    require(sorted(chosen) != sorted(right) or chosen == right, "they are not sorted: the best first")
    require(chosen == right, f"it keeps (row, token) {chosen}; the best three are {right}")
    expected = torch.tensor([float(totals[row] + log_p[row, token]) for row, token in right])
    require_close(best, expected, "the new totals are wrong")
    first = answer(torch.zeros(1), log_p[:1], 4)  # the first step: one beginning, wider than the beginnings
    require_tensor(first[2], (4,), "tokens")
    require(first[2].tolist() == [0, 2, 3, 4], "with one beginning its best tokens are asked for")
