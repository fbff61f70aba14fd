"""The exercises of *Positions*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def sinusoids(positions: Tensor, exponents: Tensor, n: float) -> tuple[Tensor, Tensor]:
    """Sines and cosines of positions / n^exponents, each (T, D)."""
    angles = positions[:, None].double() / n ** exponents.double()
    return angles.sin(), angles.cos()


def check_position_matrix(answer: Callable[[int, int, float], Tensor]) -> None:
    """The formula, and the mistakes that are found in tutorials."""
    length, d, n = 7, 10, 100.0
    got = require_tensor(answer(length, d, n), (length, d)).double()
    require(float(got.abs().max()) <= 1 + 1e-6, "there are numbers above 1: they must be sines and cosines")
    position, even, dimension = torch.arange(length), torch.arange(0, d, 2), torch.arange(d)
    sine, cosine = sinusoids(position, even / d, n)
    right = torch.stack([sine, cosine], dim=-1).flatten(1)

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-4)

    by_dimension = sinusoids(position, 2 * dimension / d, n)
    wrong_pairs = torch.where(dimension % 2 == 0, *by_dimension)
    require(not same(wrong_pairs), "the slide's mistake: in the exponent 2i, i counts pairs and not dimensions")
    own_speed = torch.where(dimension % 2 == 0, *sinusoids(position, dimension / d, n))
    require(not same(own_speed), "sine and cosine of a pair have different speeds: both have the exponent 2i/d")
    half_speed = torch.stack(sinusoids(position, even / 2 / d, n), dim=-1).flatten(1)
    require(not same(half_speed), "the exponent is i/d: it must be 2i/d")
    require(not same(torch.cat([sine, cosine], dim=1)), "all sines come before all cosines: they must alternate")
    require(not same(torch.stack([cosine, sine], dim=-1).flatten(1)), "sine and cosine are swapped: sine comes first")
    shifted = torch.stack(sinusoids(position + 1, even / d, n), dim=-1).flatten(1)
    require(not same(shifted), "positions begin at 1: the first is 0")
    usual = torch.stack(sinusoids(position, even / d, 10000.0), dim=-1).flatten(1)
    require(not same(usual), "n is not used: it is 10000 whatever is given")
    require_close(got, right, "a number is wrong")


def check_alibi_bias(answer: Callable[[int, float], Tensor]) -> None:
    """Sign, direction, and nothing above the diagonal."""
    got = require_tensor(answer(5, 0.25), (5, 5))
    back = (torch.arange(5)[:, None] - torch.arange(5)).clamp(min=0).float()
    require(not torch.equal(got, 0.25 * back), "the sign is wrong: what is farther must get a lower score")
    require(not torch.equal(got, -0.25 * back.T), "it is transposed: rows are queries, and the past is to their left")
    full = -0.25 * (back + back.T)
    require(not torch.equal(got, full), "it falls to the right too: above the diagonal it must be 0")
    require(not torch.equal(got, -back), "the slope is not used")
    falling = bool((got.triu(1) > 0).any())
    require(not falling, "there are positive numbers above the diagonal, which would favour the future: they must be 0")
    require_close(got, -0.25 * back, "a number is wrong")
