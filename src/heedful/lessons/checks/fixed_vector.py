"""The exercises of *Sequences into a fixed vector*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_run_rnn(answer: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """The state is carried, begins at zero, and the last one is returned."""
    x, w, u, b = torch.randn(6, 3), torch.randn(4, 3), 0.5 * torch.randn(4, 4), torch.randn(4)

    def states(x: Tensor) -> Tensor:
        h, found = torch.zeros(4), []
        for x_t in x:
            h = torch.tanh(w @ x_t + u @ h + b)
            found.append(h)
        return torch.stack(found)

    got = answer(x, w, u, b)
    every = isinstance(got, Tensor) and tuple(got.shape) == (6, 4)
    require(not every, "it returns the states after every symbol: only the last one is asked for")
    got = require_tensor(got, (4,))

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-4)

    linear, shared = torch.zeros(4), torch.zeros(4)
    for x_t in x:
        linear = w @ x_t + u @ linear + b
        shared = torch.tanh(w @ x_t + u.T @ shared + b)
    require(not same(torch.tanh(w @ x[-1] + b)), "the old state has no part in the new one: where is U h?")
    require(not same(states(x)[0]), "it returns after the first symbol: is the `return` inside the loop?")
    require(not same(states(x[:-1])[-1]), "the last symbol is not read")
    require(not same(linear), "the tanh is missing")
    require(not same(shared), "U is transposed: the product is U h")
    require(not same(states(x.flip(0))[-1]), "the symbols are read from last to first")
    require_close(got, states(x)[-1], "the state is wrong")


def check_shift_right(answer: Callable[[Tensor, int], Tensor]) -> None:
    """The start symbol in front, nothing of the answer ahead of its time."""
    targets = torch.randint(1, 9, (3, 5))
    targets[:, 0] = torch.tensor([1, 2, 3])  # so that no shifted row is its own original
    targets[:, -1] = torch.tensor([4, 5, 6])
    before = targets.clone()
    got = answer(targets, 7)
    longer = isinstance(got, Tensor) and tuple(got.shape) == (3, 6)
    require(not longer, "it is one symbol too long: the last target is nobody's input")
    got = require_tensor(got, (3, 5))
    require(torch.equal(targets, before), "it changed the targets: make a new tensor")
    require(not torch.equal(got, targets), "nothing is shifted: the decoder would read the answer it must write")
    left = torch.cat([targets[:, 1:], torch.full((3, 1), 7)], dim=1)
    require(not torch.equal(got, left), "it is shifted to the left: the decoder would see the future")
    require(
        not torch.equal(got, targets.roll(1, dims=1)), "the last target came round to the front: put the start there"
    )
    zero = torch.cat([torch.zeros(3, 1, dtype=torch.long), targets[:, :-1]], dim=1)
    require(not torch.equal(got, zero), "the first symbol is 0: it must be the `start` that is given")
    require(got.dtype == targets.dtype, f"the ids are {got.dtype}: they must stay {targets.dtype}")
    expected = torch.cat([torch.full((3, 1), 7), targets[:, :-1]], dim=1)
    require_close(got, expected, "a symbol is wrong")
