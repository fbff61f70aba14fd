"""Cosine similarity before and after a projection: why attention projects to queries and keys before it compares.

Latent semantic indexing (Deerwester et al. 1990) is the classic example: two users who have seen no film in common are
orthogonal as rows of a ratings table, and nearly parallel in the space of its concepts. Queries and keys are such
spaces, learned, one pair for each head.

    N rows, M columns, K concepts, T positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.models.base import Batch, Model
from heedful.observe.capture import capture
from heedful.observe.names import activation_names, stack_names


def cosine_similarity(rows: Tensor, others: Tensor | None = None) -> Tensor:
    """The cosine similarity of every row (N, E) with every one of `others` (M, E), by default themselves: (N, M)."""
    others = rows if others is None else others
    return F.normalize(rows.float(), dim=-1) @ F.normalize(others.float(), dim=-1).transpose(-2, -1)


@dataclass(frozen=True)
class ConceptSpace:
    """The truncated SVD U S Vᵀ of a table (N, M) with K singular values."""

    rows: Tensor  # (N, K)
    strengths: Tensor  # (K,)
    columns: Tensor  # (M, K)

    def project(self, rows: Tensor) -> Tensor:
        """Project rows of the table, known or new (..., M), into the concept space (..., K)."""
        return rows.to(self.columns) @ self.columns


def latent_semantic_indexing(table: Tensor, k: int) -> ConceptSpace:
    """The concept space of a table of ratings or word counts: its truncated SVD of rank k."""
    if table.ndim != 2 or not 1 <= k <= min(table.shape):
        raise ValueError(f"{k} concepts of a table {tuple(table.shape)}: 1 to its smaller side are possible")
    u, s, v = torch.linalg.svd(table.double(), full_matrices=False)
    return ConceptSpace(u[:, :k], s[:k], v[:k].T)


@torch.no_grad()
def projection_similarity(model: Model, batch: Batch, layer: int, head: int) -> tuple[Tensor, Tensor]:
    """Cosine similarities (T, T) of the positions of row 0: of a layer's input, and of a head's queries with keys."""
    base = f"{stack_names(model)[-1]}.{layer}"
    if f"{base}.self.queries" not in activation_names(model):
        raise ValueError(f"there is no self-attention in layer {layer} of this {model.family} model")
    places = [f"{base}.before", f"{base}.self.queries", f"{base}.self.keys"]
    with capture(model, places) as acts:
        model(batch)
    x, queries, keys = (acts[place][0] for place in places)
    if not 0 <= head < len(queries):
        raise ValueError(f"there is no head {head}: this layer has 0 to {len(queries) - 1}")
    group = head * len(keys) // len(queries)  # grouped queries share keys
    return cosine_similarity(x), cosine_similarity(queries[head], keys[group])
