"""The exercises of *The Vision Transformer*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_into_patches(answer: Callable[[Tensor, int], Tensor]) -> None:
    """Patches row by row, each channel by channel, for images that are not square."""
    images = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6).float()
    pieces = images.reshape(2, 3, 2, 2, 3, 2)  # (B, C, rows, P, columns, P)
    got = answer(images, 2)
    grid = isinstance(got, Tensor) and tuple(got.shape) == (2, 2, 3, 12)
    require(not grid, "the patches are still in a grid: make one axis of its rows and columns")
    swapped = isinstance(got, Tensor) and tuple(got.shape) == (2, 12, 6)
    require(not swapped, "the axes are (B, C·P·P, N), as `unfold` gives them: patches come first, so swap two axes")
    got = require_tensor(got, (2, 6, 12))
    wrong_orders = {
        "a reshape alone takes pieces of rows, not squares: split both sides first": images.reshape(2, 6, 12),
        "the patches go down the columns: they must go along the rows": pieces.permute(0, 4, 2, 1, 3, 5),
        "in a patch the channels vary fastest: it must be channel by channel": pieces.permute(0, 2, 4, 3, 5, 1),
        "in a patch the pixels go down the columns: they must go along the rows": pieces.permute(0, 2, 4, 1, 5, 3),
    }  # fmt: skip
    for message, wrong in wrong_orders.items():
        require(not torch.equal(got, wrong.reshape(2, 6, 12)), message)
    require_close(got, pieces.permute(0, 2, 4, 1, 3, 5).reshape(2, 6, 12), "a number is in the wrong place")


def check_roll_out(answer: Callable[[Tensor], Tensor]) -> None:
    """The residual's half, the mean over heads, and the order of the product."""
    weights = (2 * torch.randn(3, 2, 5, 5)).softmax(dim=-1)
    eye = torch.eye(5)

    def product(steps: Tensor) -> Tensor:
        shares = eye
        for step in steps:
            shares = step @ shares
        return shares

    halves = 0.5 * eye + 0.5 * weights.mean(dim=1)  # (3, 5, 5)
    got = answer(weights)
    every = isinstance(got, Tensor) and tuple(got.shape) == (3, 5, 5)
    require(not every, "it returns the shares after every layer: only those after the last are asked for")
    got = require_tensor(got, (5, 5))
    wrong = {
        "the residual connection is missing: half of a position is itself": product(weights.mean(dim=1)),
        "the layers are in the wrong order: the first one is the rightmost factor": product(halves.flip(0)),
        "only the last layer counts: multiply by the shares so far": halves[-1],
        "one head is taken: the mean over heads is asked for": product(0.5 * eye + 0.5 * weights[:, 0]),
    }  # fmt: skip
    for message, other in wrong.items():
        require(not torch.allclose(got, other, atol=1e-4), message)
    require_close(
        got.sum(dim=1), torch.ones(5), "the rows do not sum to 1: are both halves halved, and the heads averaged?"
    )
    require_close(got, product(halves), "a share is wrong")
