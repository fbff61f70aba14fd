"""The exercises of *Attention as alignment*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_additive_scores(answer: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """v·tanh(W s + U h_j), with each matrix on its own vector."""
    s, h, w, u, v = torch.randn(4), torch.randn(6, 4), torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    got = answer(s, h, w, u, v)
    hidden = isinstance(got, Tensor) and tuple(got.shape) == (6, 4)
    require(not hidden, "it returns the hidden layer: a score is one number, v·tanh(...)")
    got = require_tensor(got, (6,))

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-4)

    right = torch.tanh(s @ w.T + h @ u.T) @ v
    require(not same(right.softmax(dim=0)), "it returns weights: the scores come before the softmax")
    require(not same((s @ w.T + h @ u.T) @ v), "the tanh is missing")
    require(not same(torch.tanh(h @ u.T) @ v), "the state s has no part in the scores")
    require(not same(torch.tanh(s @ u.T + h @ w.T) @ v), "W and U are swapped: W is for the state, U for annotations")
    require(not same(torch.tanh(s @ w + h @ u) @ v), "the matrices are transposed: the products are W s and U h")
    apart = torch.tanh(s @ w.T) @ v + torch.tanh(h @ u.T) @ v
    require(not same(apart), "one tanh for both: add W s and U h first")
    require_close(got, right, "a score is wrong")


def check_context_vector(answer: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """A weighted mean of the real annotations alone."""
    scores, h, length = torch.randn(7), torch.randn(7, 3), 4
    before = scores.clone()
    got = answer(scores, h, length)
    weights = isinstance(got, Tensor) and tuple(got.shape) == (7,)
    require(not weights, "it returns the weights: the context is the weighted sum of the annotations")
    got = require_tensor(got, (3,))
    require(torch.equal(scores, before), "it changed the scores: mask a copy (masked_fill without _)")
    everything = torch.allclose(got, scores.softmax(dim=0) @ h, atol=1e-4)
    require(not everything, "the padding leaks: its weights must be 0")
    real = torch.arange(7) < length
    zeroed = torch.allclose(got, (scores * real).softmax(dim=0) @ h, atol=1e-4)
    require(not zeroed, "the padding leaks: a score of 0 still has a weight. Which score has the weight 0?")
    after = torch.allclose(got, (scores.softmax(dim=0) * real) @ h, atol=1e-4)
    require(not after, "the weights do not sum to 1: is the padding masked after the softmax, not before?")
    right = scores[:length].softmax(dim=0)
    require(not torch.allclose(got, right @ h[:length] / length, atol=1e-4), "it is divided by the length as well")
    unweighted = torch.allclose(got, scores[:length] @ h[:length], atol=1e-4)
    require(not unweighted, "the softmax is missing: these are the scores, not the weights")
    require_close(got, right @ h[:length], "the context is wrong")
    require_close(answer(scores, h, 7), scores.softmax(dim=0) @ h, "it is wrong for a source without padding")
