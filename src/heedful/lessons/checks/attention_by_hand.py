"""The exercises of *Attention by hand*."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_scaled_attention(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Scale, axis of the softmax and shapes, with more keys than queries."""
    q, k, v = 3 * torch.randn(4, 16), torch.randn(7, 16), torch.randn(7, 5)
    require_tensor(answer(q, k, v), (4, 5))
    scores = q @ k.T
    got = require_tensor(answer(q, k, torch.eye(7)), (4, 7))  # with one-hot values the output is the weights
    wrong_scales = {
        "the scores are not divided by √D": scores,
        "the scores are divided by D, not by √D": scores / 16,
        "the scores are divided by the root of the number of keys, not of the width D": scores / math.sqrt(7),
        "the scores are multiplied by √D, not divided": scores * math.sqrt(16),
    }
    for message, wrong in wrong_scales.items():
        require(not torch.allclose(got, wrong.softmax(dim=-1), atol=1e-4), message)
    over_queries = torch.allclose(got, (scores / 4).softmax(dim=0), atol=1e-4)
    require(not over_queries, "the softmax runs over the queries: it must run over the keys, the last axis")
    sums = got.sum(dim=-1)
    require_close(sums, torch.ones(4), "the weights of a query do not sum to 1")
    require_close(got, (scores / 4).softmax(dim=-1), "a weight is wrong")
    require_close(answer(q, k, v), (scores / 4).softmax(dim=-1) @ v, "the weighted sum of values is wrong")


def check_causal_weights(answer: Callable[[Tensor], Tensor]) -> None:
    """No weight on the future, the diagonal allowed, rows that sum to 1."""
    scores = torch.randn(6, 6)
    before = scores.clone()
    got = answer(scores)
    require(isinstance(got, Tensor) and tuple(got.shape) == (6, 6), "it must return weights of shape (6, 6)")
    require(
        not bool(got.isnan().any()),
        "there are NaNs: a row in which everything is masked has no softmax. May a word attend to itself?",
    )
    require(bool(torch.equal(scores, before)), "it changed its input: mask a copy (masked_fill without _)")
    future = torch.ones(6, 6, dtype=torch.bool).triu(diagonal=1)
    past = torch.ones(6, 6, dtype=torch.bool).tril(diagonal=-1)
    upside_down = bool((got[past] == 0).all()) and bool((got[future] > 0).any())
    require(not upside_down, "the wrong triangle is masked: the past is hidden and the future is visible")
    leak = float(got[future].max())
    require(leak == 0, f"a masked position leaks: a weight of {leak:.3g} on the future, where it must be exactly 0")
    require_close(
        got.sum(dim=1), torch.ones(6), "the rows do not sum to 1: is the mask applied after the softmax, not before?"
    )
    require_close(got, scores.masked_fill(future, -torch.inf).softmax(dim=-1), "a weight is wrong")


def check_split_heads(answer: Callable[[Tensor, int], Tensor]) -> None:
    """(T, E) to (H, T, E/H), and not only by its shape."""
    x = torch.randn(5, 12)
    got = answer(x, 3)
    require(
        not (isinstance(got, Tensor) and tuple(got.shape) == (5, 3, 4)),
        "the shape is (T, H, D): heads come first, so swap two axes",
    )
    got = require_tensor(got, (3, 5, 4))
    only_reshaped = torch.equal(got, x.reshape(3, 5, 4))
    require(not only_reshaped, "a reshape alone mixes words: split the last axis first, then swap axes")
    interleaved = torch.equal(got, x.reshape(5, 4, 3).permute(2, 0, 1))
    require(not interleaved, "head h has every third number: it must have a block of neighbouring numbers")
    require_close(got, torch.stack([x[:, i : i + 4] for i in (0, 4, 8)]), "a number is in the wrong head")
    require_tensor(answer(torch.randn(2, 8), 4), (4, 2, 2))
