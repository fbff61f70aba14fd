"""The exercises of *Translation*."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_extend_beams(answer: Callable[[Tensor, Tensor, int], Any]) -> None:
    """The best of all extensions, whichever beginning they extend."""
    totals = torch.tensor([-1.0, -1.5, -6.0])
    log_p = torch.tensor(
        [
            [0.3, 0.1, 0.25, 0.2, 0.15],
            [0.02, 0.9, 0.03, 0.04, 0.01],
            [0.01, 0.01, 0.01, 0.96, 0.01],
        ]
    ).log()
    found = answer(totals, log_p, 3)
    require(found is not None, "it returned None: is there a `return`?")
    require(isinstance(found, tuple | list) and len(found) == 3, "three tensors are asked for: totals, rows, tokens")
    best, rows, tokens = (
        require_tensor(x, (3,), name) for x, name in zip(found, ("totals", "rows", "tokens"), strict=True)
    )
    chosen = list(zip(rows.tolist(), tokens.tolist(), strict=True))
    require(tokens.tolist() != [6, 0, 2], "the tokens are places among all W·V: take the rest mod V")
    without = [(2, 3), (1, 1), (0, 0)]
    require(chosen != without, "the totals of the beginnings have no part: add them first")
    require(
        sorted(chosen) != [(0, 0), (1, 1), (2, 3)],
        "each beginning has one extension: the best of all are asked for, and one beginning may have several",
    )
    require(not bool((best > 0).any()), "a total is positive: log-probabilities are added, not multiplied")
    right = [(1, 1), (0, 0), (0, 2)]
    swapped = [(token, row) for row, token in right]
    require(chosen != swapped, "rows and tokens are swapped: totals, rows, tokens")
    require(sorted(chosen) != sorted(right) or chosen == right, "they are not sorted: the best first")
    require(chosen == right, f"it keeps (row, token) {chosen}; the best three are {right}")
    expected = torch.tensor([float(totals[row] + log_p[row, token]) for row, token in right])
    require_close(best, expected, "the new totals are wrong")
    first = answer(torch.zeros(1), log_p[:1], 4)  # the first step: one beginning, wider than the beginnings
    require_tensor(first[2], (4,), "tokens")
    require(first[2].tolist() == [0, 2, 3, 4], "with one beginning its best tokens are asked for")


def check_clipped_precision(answer: Callable[[list[str], list[str], int], Any]) -> None:
    """n-grams of the translation that the reference has, each at most as often."""

    def share(said: str, wanted: str, n: int) -> float:
        got = answer(said.split(), wanted.split(), n)
        require(got is not None, "it returned None: is there a `return`?")
        return float(got)

    def same(value: float, other: float) -> bool:
        return abs(value - other) < 1e-6

    # "the" seven times is the example of Papineni et al. 2002, section 2.1
    the, cat = "the the the the the the the", "the cat is on the mat"
    got = share(the, cat, 1)
    require(not same(got, 1), 'the counts are not clipped: of seven times "the" the reference has two')
    require(not same(got, 2 / 6), "it is divided by the reference's pieces: precision asks about the translation's")
    require(not same(got, 1 / 7), "each piece is counted once: count how often it occurs (Counter, not set)")
    require(same(got, 2 / 7), f"of {the!r} for {cat!r} it says {got:.3g}, not 2/7")
    said, wanted = "the cat sat on the cat mat", "the cat sat on the mat"
    got = share(said, wanted, 2)
    require(not same(got, share(said, wanted, 1)), "n is ignored: pieces of two words are asked for")
    require(not same(got, 4 / 7), "there are len - n + 1 pieces of n words, not len")
    require(same(got, 4 / 6), f"of the pieces of two words of {said!r} for {wanted!r} it says {got:.3g}, not 4/6")
    require(same(share(cat, cat, 4), 1), "a translation that is the reference has precision 1")
