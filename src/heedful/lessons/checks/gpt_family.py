"""The exercises of *GPT-1, 2, 3 and what came after*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_banded_mask(answer: Callable[[int, int], Tensor]) -> None:
    """Causal, as wide as asked, itself included."""
    place = torch.arange(9)
    distance = place[:, None] - place
    got = require_tensor(answer(9, 3), (9, 9))
    require(got.dtype == torch.bool, f"the mask is {got.dtype}: it must be of booleans")

    def same(other: Tensor) -> bool:
        return torch.equal(got, other)

    past, narrow = distance >= 0, distance.abs() < 3
    require(not same(~(past & narrow)), "it is the other way round: True is where a query may look")
    require(not same(past), "there is no band: the whole past is visible")
    require(not same(narrow), "the future leaks: a band on both sides of the diagonal")
    require(not same(past.T & narrow), "the wrong triangle: it shows the future and hides the past")
    require(
        not same(past & (distance <= 3)), "one position too many: the window of 3 is the position itself and two before"
    )
    require(not same((distance > 0) & (distance <= 3)), "a position must see itself")
    require(not same((distance > 0) & narrow), "a position must see itself")
    require_close(got.int(), (past & narrow).int(), "a position is wrong")
    require(torch.equal(answer(4, 10), torch.ones(4, 4).tril().bool()), "a window wider than the text is a causal mask")


def check_llama_parameters(answer: Callable[[int, int, int, int, int, int], int]) -> None:
    """Grouped keys, three matrices of the gate, no biases, two embeddings."""
    d, n_layers, n_heads, n_kv_heads, d_ff, vocabulary = 48, 3, 6, 2, 100, 500
    got = answer(d, n_layers, n_heads, n_kv_heads, d_ff, vocabulary)
    require(got is not None, "it returned None: is there a `return`?")
    require(isinstance(got, int | float), f"it returned a {type(got).__name__}, not a number")
    grouped = 2 * d * d + 2 * d * 16
    right = n_layers * (grouped + 3 * d * d_ff + 2 * d) + d + 2 * vocabulary * d
    wrong = {
        "keys and values have n_kv_heads heads, not n_heads": n_layers * 2 * d * (d - 16),
        "the gate is missing: the feed-forward has three matrices": -n_layers * d * d_ff,
        "the head is not tied: it has a matrix of its own": -vocabulary * d,
        "the last norm is missing": -d,
        "the norms are missing: two in each block and one at the end": -(2 * n_layers + 1) * d,
        "the norms of the blocks are missing": -2 * n_layers * d,
        "there are two norms in each block, not one": -n_layers * d,
        "an RMSNorm has no bias: d numbers each": (2 * n_layers + 1) * d,
        "the output matrix of attention is missing": -n_layers * d * d,
        "the blocks are counted once: there are n_layers of them": right_of_one_block(d, 16, d_ff) * (1 - n_layers),
    }
    for message, difference in wrong.items():
        require(got - right != difference, message)
    require(got == right, f"for d 48, 3 layers, 6 heads, 2 of keys, d_ff 100, 500 tokens it is {right:,}, not {got:,}")
    seven = answer(4096, 32, 32, 32, 11008, 32000)
    require(seven == 6_738_415_616, f"LLaMA 7B has 6,738,415,616 parameters, not {seven:,}")


def right_of_one_block(d: int, d_keys: int, d_ff: int) -> int:
    """The parameters of one block."""
    return 2 * d * d + 2 * d * d_keys + 3 * d * d_ff + 2 * d
