"""The exercises of *Fewer bits, fewer steps*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_quantize_symmetric(answer: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
    """A scale for each row by its largest weight, and whole numbers by rounding."""
    weight = torch.randn(4, 40) * torch.tensor([1.0, 3.0, 0.1, 7.0])[:, None]
    weight[:, 0] = -1.5 * weight.abs().amax(dim=1)  # the largest of each row is negative
    for bits, top in ((8, 127), (4, 7)):
        made = answer(weight.clone(), bits)
        require(isinstance(made, tuple | list) and len(made) == 2, "it must return the numbers and the scales")
        require(
            not (isinstance(made[1], Tensor) and made[1].ndim == 0),
            "there is one scale for the whole matrix: each row has its own",
        )
        numbers, scales = made
        require(
            not (isinstance(scales, Tensor) and tuple(scales.shape) == (4, 1)),
            "the shape of the scales is (N, 1), not (N)",
        )
        require(
            not (isinstance(scales, Tensor) and tuple(scales.shape) == (40,)),
            "the scales are those of columns, not of rows",
        )
        numbers, scales = require_tensor(numbers, (4, 40), "the numbers"), require_tensor(scales, (4,), "the scales")
        numbers = numbers.float()
        largest = weight.abs().amax(dim=1)
        wrong = {
            "the scales are those of the largest weight with its sign: take absolute values": weight.amax(dim=1) / top,
            f"the largest weight becomes {top + 1}: with {bits} bits the last number is {top}": largest / (top + 1),
            f"the largest weight becomes {2 * top + 1}: one bit is for the sign": largest / (2 * top + 1),
            "the scales are upside down: weight ≈ numbers * scale": top / largest,
        }
        for message, values in wrong.items():
            require(not torch.allclose(scales, values), message)
        require_close(scales, largest / top, "a scale is wrong", 1e-5)
        require(torch.equal(numbers, numbers.round()), "the numbers are not whole: round them")
        exact = weight / scales[:, None]
        cut = torch.equal(numbers, exact.trunc()) or torch.equal(numbers, exact.floor())
        require(not cut, "the numbers are cut off, not rounded: the error is up to a whole step")
        require_close(numbers, exact.round(), "a number is wrong")


def check_leftover(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """(p - q)+ with sum 1, and p where nothing is left."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.4, 0.1, 0.4])
    got = require_tensor(answer(p, q), (4,))
    require(bool((got >= 0).all()), "there are negative probabilities: (p - q)+ is 0 where q is larger")
    wrong = {
        "it is p itself: what the draft has offered already must be taken off": p,
        "it is (q - p)+: the other way round": torch.tensor([0.0, 0.2, 0.0, 0.8]),
        "it is not divided by its sum": torch.tensor([0.4, 0.0, 0.1, 0.0]),
        "it is a softmax of the differences: divide by the sum": (p - q).softmax(dim=0),
    }
    for message, values in wrong.items():
        require(not torch.allclose(got, values, atol=1e-5), message)
    require_close(got, torch.tensor([0.8, 0.0, 0.2, 0.0]), "a probability is wrong")
    same = answer(p, p.clone())
    require(isinstance(same, Tensor) and not bool(same.isnan().any()), "where p and q are the same it divides by 0")
    require_close(same, p, "where p and q are the same, nothing is left: return p")


def check_tokens_per_pass(answer: Callable[[Tensor], Tensor]) -> None:
    """The guesses before the first rejection, and one token more."""
    accepted = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    got = torch.as_tensor(answer(accepted)).float()
    require(got.ndim == 0, f"it returned a tensor of shape {tuple(got.shape)}: the mean over passes is asked for")
    wrong = {
        "the target's own token is missing: each pass gives one more": 1.5,
        "it counts guesses after a rejection, which are lost": 3.25,
        "it counts guesses after a rejection, which are lost, and not the target's own token": 2.25,
        "it is the share of accepted guesses, not the tokens of a pass": 0.75,
    }
    for message, value in wrong.items():
        require(abs(float(got) - value) > 1e-4, message)
    require(
        abs(float(got) - 2.5) < 1e-4, f"for passes of 4, 1, 2 and 3 tokens it is {float(got):.3f}, and should be 2.5"
    )
    none = torch.zeros(5, 2, dtype=torch.bool)
    require(abs(float(answer(none)) - 1) < 1e-6, "where no guess is accepted a pass gives 1 token")
