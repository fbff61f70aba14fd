"""Token embeddings, and nearest neighbours and analogies among them.

V vocabulary, E model width
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """An embedding table (V, E), times `scale` where there is one (√d_model: the original Transformer, Gemma)."""

    def __init__(self, vocab_size: int, d_model: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., E)."""
        x = nn.functional.embedding(tokens, self.weight)  # (..., E)
        # The reference rounds the scale to the weights' precision before multiplying.
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype)


def nearest(matrix: Tensor, vector: Tensor, k: int = 10, *, but: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Indices (k,) and cosine similarities (k,) of the rows of a matrix (V, E) nearest to a vector (E,), best first.

    Rows in `but` are excluded.
    """
    n_left = len(matrix) - len(set(but))
    if not 1 <= k <= n_left:
        raise ValueError(f"k is {k}: there are {n_left} rows to choose from")
    cosines = nn.functional.cosine_similarity(matrix.float(), vector.float(), dim=-1)
    cosines[list(but)] = -torch.inf
    best = cosines.topk(k)
    return best.indices, best.values


def analogy(matrix: Tensor, a: int, b: int, c: int, k: int = 10) -> tuple[Tensor, Tensor]:
    """a is to b as c is to which row? The `nearest` to b - a + c (king - man + woman, Mikolov et al. 2013, section 4).

    The three rows are normalized first and excluded from the answer, as in the authors' evaluation.
    """
    unit = nn.functional.normalize(matrix[[a, b, c]].float(), dim=-1)
    return nearest(matrix, unit[1] - unit[0] + unit[2], k, but=(a, b, c))
