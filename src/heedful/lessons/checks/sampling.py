"""The exercises of *Choosing the next token*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_nucleus(answer: Callable[[Tensor, float], Tensor]) -> None:
    """The fewest tokens that reach p, in the order of the vocabulary, sum 1."""
    shares = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    logits = shares.log() + 3
    before = logits.clone()
    got = require_tensor(answer(logits, 0.7), (5,))
    require(torch.equal(logits, before), "it changed its input: make a new tensor")

    def kept(*ids: int, given: Tensor = shares) -> Tensor:
        found = torch.zeros(5)
        found[list(ids)] = given[list(ids)]
        return found

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-5)

    nucleus = kept(1, 3, 4)
    require(not same(shares), "nothing is cut")
    require(not same(nucleus), "what is left must be divided by its sum: it sums to 0.85")
    short = kept(1, 3)
    require(
        not (same(short) or same(short / short.sum())),
        "one token is missing: 0.4 and 0.25 have 0.65, less than 0.7. The token that crosses the border is in",
    )
    sorted_ones = torch.tensor([0.4, 0.25, 0.2, 0, 0]) / 0.85
    require(not same(sorted_ones), "the probabilities are in sorted order: put them back where their tokens are")
    softened = torch.where(nucleus > 0, nucleus, 0).softmax(dim=0)
    require(not same(softened), "a softmax of probabilities is not what is left: a token outside must have exactly 0")
    require(float(got.sum()) > 0, "nothing is left")
    require_close(got.sum(), torch.tensor(1.0), "the probabilities do not sum to 1")
    require_close(got, nucleus / nucleus.sum(), "a probability is wrong")
    one = answer(logits, 0.1)
    require(not bool(one.isnan().any()), "with p 0.1 nothing is left: the likeliest token always is")
    require_close(one, kept(1) / 0.4, "with p 0.1 the likeliest token alone is left")


def check_penalized_logits(answer: Callable[[Tensor, list[int], float, float], Tensor]) -> None:
    """Frequency per occurrence, presence once, nothing for other tokens."""
    logits, written = torch.randn(6), [2, 4, 2, 2]
    counts = torch.tensor([0, 0, 3, 0, 1, 0])
    before = logits.clone()
    got = require_tensor(answer(logits, written, 0.5, 0.7), (6,))
    require(torch.equal(logits, before), "it changed its input: make a new tensor")

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-5)

    seen = (counts > 0).float()
    require(not same(logits), "nothing is changed")
    require(not same(logits + counts * 0.5 + seen * 0.7), "a penalty is subtracted, not added")
    require(not same(logits - seen * 1.2), "the frequency penalty counts: three times for an id that came three times")
    require(not same(logits - counts * 1.2), "the presence penalty is taken once, however often the id came")
    require(not same(logits - counts * 0.7 - seen * 0.5), "frequency and presence are exchanged")
    require(not same(logits - counts * 0.5 - 0.7), "the presence penalty is for ids that came, not for all")
    require(not same(logits - counts * 0.5), "the presence penalty is missing")
    require(not same(logits - seen * 0.7), "the frequency penalty is missing")
    require_close(got, logits - counts * 0.5 - seen * 0.7, "a logit is wrong")
    require_close(answer(logits, [], 0.5, 0.7), logits, "nothing has been written, and a logit is changed")
