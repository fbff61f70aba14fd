"""The exercises of *Query, key, value*."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_to_concepts(answer: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """Coordinates up to the sign of each concept: their absolute values are compared."""
    ratings, users = torch.rand(9, 6) * 5, torch.rand(4, 6) * 5
    got = require_tensor(answer(ratings, users, 3), (4, 3))
    _, sizes, vt = torch.linalg.svd(ratings, full_matrices=False)
    right = users @ vt[:3].T

    def same(other: Tensor) -> bool:
        return torch.allclose(got.abs(), other.abs(), atol=1e-3)

    require(not same(users @ vt[-3:].T), "these are the last concepts, which explain least: take the first")
    require(not same(users @ vt[:, :3]), "V is transposed: torch's svd returns Vᵀ, whose rows are the concepts")
    scaled = same(right / sizes[:3]) or same(right * sizes[:3])
    require(not scaled, "the singular values do not belong here: the coordinates are x V alone")
    unit = torch.nn.functional.normalize
    require(not same(unit(right, dim=-1)), "the coordinates are normalized: leave their length as it is")
    centred = torch.linalg.svd(ratings - ratings.mean(dim=0), full_matrices=False).Vh
    require(not same(users @ centred[:3].T), "the table was centred first, which is PCA: take the table as it is")
    require_close(got.abs(), right.abs(), "a coordinate is wrong")


def check_projected_scores(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Both projections, the right way round, scaled by the width of the projection."""
    x, w_query, w_key = torch.randn(5, 12), torch.randn(12, 4), torch.randn(12, 4)
    got = require_tensor(answer(x, w_query, w_key), (5, 5))
    scores = (x @ w_query) @ (x @ w_key).T

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-3)

    require(not same(scores), "the scores are not divided by √D")
    require(not same(scores / math.sqrt(12)), "the divisor is √D of the projection, not √E of the words")
    require(not same(scores / 4), "the scores are divided by D, not by √D")
    require(not same(scores.T / 2), "rows and columns are swapped: row t belongs to the query of word t")
    for name, w in {"query": w_query, "key": w_key}.items():
        shared = (x @ w) @ (x @ w).T / 2
        require(not same(shared), f"only w_{name} is used: queries and keys have a matrix each")
    require(not same((scores / 2).softmax(dim=-1)), "these are weights: the exercise asks for scores, without softmax")
    require_close(got, scores / 2, "a score is wrong")
