"""The exercises of *Circuits*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_induction_scores(answer: Callable[[Tensor, int], Tensor]) -> None:
    """The diagonal t - n + 1 of the repeated half, a mean for each head."""
    n = 5
    weights = torch.rand(3, 4, 2 * n, 2 * n).tril()
    weights = weights / weights.sum(dim=-1, keepdim=True)

    def scores(shift: int, first: int = n) -> Tensor:
        t = torch.arange(first, 2 * n)
        return weights[:, :, t, t - shift].mean(dim=(0, 2))

    got = answer(weights, n)
    by_row = isinstance(got, Tensor) and tuple(got.shape) == (3, 4)
    require(not by_row, "the mean runs over positions alone: take it over the batch too")
    got = require_tensor(got, (4,))
    wrong = {
        "it looks at the earlier copy of the token itself (t - n): an induction head looks at the one after it": scores(
            n
        ),
        "it looks two after the earlier copy, or one before it: the place is t - n + 1": scores(n + 1),
        "it looks at the previous token (t - 1)": scores(1),
        "it counts a position before the repetition: begin at t = n": scores(n - 1, first=n - 1),
        "query and key are swapped: rows look, columns are looked at": weights.transpose(2, 3)[
            :, :, torch.arange(n, 2 * n), torch.arange(1, n + 1)
        ].mean(dim=(0, 2)),
        "it is a sum, not a mean": scores(n - 1) * 3 * n,
    }
    for message, values in wrong.items():
        require(not torch.allclose(got, values, atol=1e-5), message)
    require_close(got, scores(n - 1), "a score is wrong")


def check_without_head(answer: Callable[[Tensor, int], Tensor]) -> None:
    """One head is its mean over batch and positions; the others and the input are as before."""
    heads = torch.randn(3, 4, 5, 6) + 1
    before = heads.clone()
    got = require_tensor(answer(heads, 2), (3, 4, 5, 6))
    require(torch.equal(heads, before), "it changed its input: work on a clone")
    others = [0, 1, 3]
    require(torch.equal(got[:, others], before[:, others]), "another head than the one asked for has changed")
    one = got[:, 2]
    wrong = {
        "nothing is replaced": before[:, 2],
        "the head is zero: its mean is asked for": torch.zeros(3, 5, 6),
        "the mean runs over positions alone: each row keeps its own, take it over the batch too": before[:, 2].mean(
            dim=1, keepdim=True
        ),
        "the mean runs over the batch alone: take it over positions too": before[:, 2].mean(dim=0, keepdim=True),
        "the mean runs over the D numbers too: each number has a mean of its own": before[:, 2].mean(),
        "the mean is that of all heads": before.mean(dim=(0, 1, 2)),
    }
    for message, values in wrong.items():
        require(not torch.allclose(one, values.expand(3, 5, 6), atol=1e-5), message)
    require_close(one, before[:, 2].mean(dim=(0, 1)).expand(3, 5, 6), "the mean is wrong")
