"""Token embeddings, scaled where the paper scales them (√d_model: the original Transformer, Gemma), and what lies
near what in an embedding (`nearest`, `analogy`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.weight)  # (..., E)
        # The reference rounds the scale to the weights' precision before it multiplies.
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype)


def nearest(matrix: Tensor, vector: Tensor, k: int = 10, *, but: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """The k rows of an embedding matrix (V, E) that point most in a vector's direction (E,), except the rows `but`.

    Their numbers (k,) and the cosines of the angles (k,), best first.
    """
    n_left = len(matrix) - len(set(but))
    if not 1 <= k <= n_left:
        raise ValueError(f"k is {k}: there are {n_left} rows to choose from")
    cosines = nn.functional.cosine_similarity(matrix.float(), vector.float(), dim=-1)
    cosines[list(but)] = -torch.inf
    best = cosines.topk(k)
    return best.indices, best.values


def analogy(matrix: Tensor, a: int, b: int, c: int, k: int = 10) -> tuple[Tensor, Tensor]:
    """Row a is to row b as row c is to which? king - man + woman (Mikolov et al. 2013, section 4), as `nearest` has it.

    The rows are made equally long first, and the three that asked are no answer, as in the authors' evaluation.
    """
    unit = nn.functional.normalize(matrix[[a, b, c]].float(), dim=-1)
    return nearest(matrix, unit[1] - unit[0] + unit[2], k, but=(a, b, c))
