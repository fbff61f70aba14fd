"""The exercises of *From a bigram table to GPT*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_bigram_probabilities(answer: Callable[[Tensor, int], Tensor]) -> None:
    """Pairs counted in the right direction, one added, rows that sum to 1."""
    ids, n = torch.randint(0, 5, (200,)), 6  # the last letter never comes
    counts = torch.zeros(n, n)
    for a, b in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
        counts[a, b] += 1
    got = answer(ids, n)
    require(
        not (isinstance(got, Tensor) and bool(got.isnan().any())),
        "there are NaNs: a letter that never comes has a row of zeros. Is one added to every count?",
    )
    got = require_tensor(got, (n, n))

    def same(other: Tensor) -> bool:
        return torch.allclose(got.float(), other, atol=1e-5)

    added = counts + 1
    require(not same(added), "these are counts: divide each row by its sum")
    require(not same(added / added.sum()), "all numbers together sum to 1: each row must, since it is p(next | this)")
    require(not same(added / added.sum(dim=0)), "the columns sum to 1: divide by the sums of the rows")
    turned = added.T / added.T.sum(dim=1, keepdim=True)
    require(not same(turned), "the pairs are turned round: the row is this letter, the column the next")
    plain = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    require(not same(plain), "no pair may be impossible: add one to every count")
    require_close(got.sum(dim=1), torch.ones(n), "a row does not sum to 1")
    require_close(got, added / added.sum(dim=1, keepdim=True), "a probability is wrong")


def check_mean_of_past(answer: Callable[[Tensor], Tensor]) -> None:
    """The mean over rows up to and with each, nothing of the future."""
    x = torch.randn(6, 3)
    before = x.clone()
    got = require_tensor(answer(x), (6, 3))
    require(torch.equal(x, before), "it changed its input: make a new tensor")

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-5)

    n = torch.arange(1, 7)[:, None]
    require(not same(x.mean(dim=0).expand(6, 3)), "the future leaks: every row has the mean of all rows")
    require(not same(x.cumsum(dim=0)), "these are sums: divide row t by t + 1")
    require(not same(x.cumsum(dim=0) / 6), "every row is divided by T: row t has t + 1 rows to average")
    later = x.flip(0).cumsum(dim=0).flip(0) / n.flip(0)
    require(not same(later), "the wrong triangle: it averages the future and not the past")
    require_close(got[0], x[0], "the first row has only itself to average")
    changed = x.clone()
    changed[4:] += 1
    leak = float((answer(changed)[:4] - got[:4]).abs().max())
    require(leak == 0, f"the future leaks: rows 0 to 3 change by {leak:.2g} when rows 4 and 5 do")
    require_close(got, x.cumsum(dim=0) / n, "a mean is wrong")
