"""The exercises of *The cache and the batch*."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_attend_cached(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """The new key and value are appended at the end, and attended to."""
    q, k, v = (torch.randn(2, 4) for _ in range(3))
    keys, values = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    made = answer(q, k, v, keys, values)
    require(isinstance(made, tuple | list) and len(made) == 3, "it must return the output, the keys and the values")
    got, all_keys, all_values = made
    require_tensor(all_keys, (2, 6, 4), "the keys")
    require_tensor(all_values, (2, 6, 4), "the values")
    got = require_tensor(got, (2, 4), "the output")
    first = torch.equal(all_keys[:, 0], k) and torch.equal(all_keys[:, 1:], keys)
    require(not first, "the new key stands at the front: the cache is in the order of the text")
    require_close(all_keys, torch.cat([keys, k[:, None]], dim=1), "the keys are not the old ones and the new one")
    require_close(all_values, torch.cat([values, v[:, None]], dim=1), "the values are not the old ones and the new one")

    def attended(keys: Tensor, values: Tensor, scale: float = 0.5) -> Tensor:
        return F.scaled_dot_product_attention(q[:, None], keys, values, scale=scale)[:, 0]

    wrong = {
        "the new token does not attend to itself: its key and value belong to the cache first": attended(keys, values),
        "the scores are not divided by √D": attended(all_keys, all_values, 1.0),
        "the output is the mean of the values: where are the scores?": all_values.mean(dim=1),
    }
    for message, values_of in wrong.items():
        require(not torch.allclose(got, values_of, atol=1e-4), message)
    require_close(got, attended(all_keys, all_values), "the output is wrong")


def check_cache_bytes(answer: Callable[..., int]) -> None:
    """Keys and values, every layer, every row."""
    got = answer(3, 2, 5, 7, 11, 4)
    right = 2 * 3 * 2 * 5 * 7 * 11 * 4
    require(isinstance(got, int | float), f"it returned a {type(got).__name__}, not a number")
    factors = {
        "keys and values are two": 2,
        "every layer has a cache of its own": 3,
        "every row has a cache of its own": 11,
        "it counts numbers, not bytes": 4,
    }
    for message, factor in factors.items():
        require(got * factor != right, f"it is {factor} times too small: {message}")
    require(got == right, f"it is {got:,}, and should be {right:,}")
    require(answer(96, 96, 128, 2048) == 9_663_676_416, "for GPT-3 with the defaults it should be 9,663,676,416")


def check_continuous_steps(answer: Callable[[list[int], int], int]) -> None:
    """A row is given to the next request when it is free, in the order of the queue."""
    lengths = [3, 12, 5, 9, 2, 7, 4, 10, 3, 6]
    before = list(lengths)
    got = answer(lengths, 3)
    require(lengths == before, "it changed the list that it was given: work on a copy")
    require(isinstance(got, int), f"it returned a {type(got).__name__}, not a whole number")
    require(got != 37, "rows wait for the longest of their batch (37 steps): give a row away when it is free")
    require(got != sum(lengths), "it writes one text after another (61 steps): three rows run at once")
    require(got not in (20, 21), "rows cannot share a text: it is not the sum of lengths divided by rows")
    require(got == 22, f"for the lesson's requests it is {got}, and should be 22")
    for rows, expected in ((1, 61), (2, 31), (4, 19), (100, 12)):
        require(answer(list(before), rows) == expected, f"with {rows} rows it should take {expected} steps")
    require(answer([2, 2, 8], 2) == 10, "for [2, 2, 8] on two rows it should be 10: the order of the queue is kept")
