"""Checks of the lesson "Word vectors"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.lessons.checking import require


def check_nearest_rows(answer: Callable[[Tensor, int, int], Any]) -> None:
    """The k rows with the highest cosine, best first, without the row itself."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(10):
        lengths = torch.rand(30, 1, generator=draw) * 9 + 1
        matrix = F.normalize(torch.randn(30, 6, generator=draw), dim=1) * lengths
        index, k = int(torch.randint(30, (), generator=draw)), 5
        found = answer(matrix.clone(), index, k)
        require(found is not None, "it returned None: is there a `return`?")
        found = found.tolist() if isinstance(found, Tensor) else list(found)
        require(len(found) == k, f"asked for {k} rows, it returned {len(found)}")
        require(index not in found, f"row {index} is among its own neighbours: leave it out")
        cosines = F.cosine_similarity(matrix, matrix[index][None], dim=-1)
        cosines[index] = -torch.inf
        expected = cosines.topk(k).indices.tolist()
        if found == expected:
            continue
        products = matrix @ matrix[index]
        products[index] = -torch.inf
        require(
            found != products.topk(k).indices.tolist(),
            "these are the largest dot products: long vectors win; divide by the lengths of both",
        )
        distances = (matrix - matrix[index]).norm(dim=-1)
        distances[index] = torch.inf
        require(
            found != distances.topk(k, largest=False).indices.tolist(),
            "these have the smallest distance, not the smallest angle: use the cosine",
        )
        lowest = (-cosines).clone()
        lowest[index] = -torch.inf
        require(found != lowest.topk(k).indices.tolist(), "these are the rows with the lowest cosine, not the highest")
        require(sorted(found) != sorted(expected), f"the right rows in the wrong order: {found}, best first {expected}")
        require(False, f"of row {index} it found {found}, should be {expected}")


def check_solve_analogy(answer: Callable[[Tensor, int, int, int], Any]) -> None:
    """The row nearest to b - a + c of unit rows, none of the three."""
    draw = torch.Generator().manual_seed(5)
    for trial in range(20):
        base = torch.randn(4, 8, generator=draw)
        lengths = torch.rand(24, 1, generator=draw) * 9 + 1
        matrix = F.normalize(torch.cat([base, torch.randn(20, 8, generator=draw)]), dim=1) * lengths
        a, b, c = torch.randperm(24, generator=draw)[:3].tolist()
        found = answer(matrix.clone(), a, b, c)
        require(found is not None, "it returned None: is there a `return`?")
        found = int(found)
        unit = F.normalize(matrix, dim=1)
        require(
            found not in (a, b, c), f"it answered with row {found}, a word of the question: those three are left out"
        )

        def best(vector: Tensor, rows: Tensor = unit, but: tuple[int, ...] = (a, b, c)) -> int:
            scores = rows @ vector
            scores[list(but)] = -torch.inf
            return int(scores.argmax())

        expected = best(unit[b] - unit[a] + unit[c])
        if found == expected:
            continue
        require(found != best(unit[a] - unit[b] + unit[c]), "that is a - b + c: the difference goes from a to b")
        require(found != best(unit[b] + unit[a] + unit[c]), "that is a + b + c: a is subtracted")
        require(
            found != best(matrix[b] - matrix[a] + matrix[c]), "scale the three rows to length 1 before adding them up"
        )
        require(
            found != best(unit[b] - unit[a] + unit[c], matrix),
            "the answer has the largest dot product: long rows win; use the cosine",
        )
        require(False, f"trial {trial}: it answered {found}, should be {expected}")
