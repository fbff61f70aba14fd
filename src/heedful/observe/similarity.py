"""Why attention projects before it compares: what is alike depends on the space in which one looks.

Latent semantic indexing (Deerwester et al. 1990) is the old example: two users who have seen no film in common are at
right angles as rows of a table, and nearly parallel in the space of its concepts. Queries and keys are such spaces,
learned, one pair for each head.

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
    """The cosine of the angle between every row (N, E) and every other (M, E), themselves unless given: (N, M)."""
    others = rows if others is None else others
    return F.normalize(rows.float(), dim=-1) @ F.normalize(others.float(), dim=-1).transpose(-2, -1)


@dataclass(frozen=True)
class ConceptSpace:
    """A table (N, M) as rows in concepts, strengths, concepts in columns: U S Vᵀ cut off after K."""

    rows: Tensor  # (N, K)
    strengths: Tensor  # (K,)
    columns: Tensor  # (M, K)

    def project(self, rows: Tensor) -> Tensor:
        """Rows of the table, old or new (..., M), as points in the space of concepts (..., K)."""
        return rows.to(self.columns) @ self.columns


def latent_semantic_indexing(table: Tensor, k: int) -> ConceptSpace:
    """The k strongest concepts of a table of ratings or word counts, by singular value decomposition."""
    if table.ndim != 2 or not 1 <= k <= min(table.shape):
        raise ValueError(f"{k} concepts of a table {tuple(table.shape)}: 1 to its smaller side are possible")
    u, s, v = torch.linalg.svd(table.double(), full_matrices=False)
    return ConceptSpace(u[:, :k], s[:k], v[:k].T)


@torch.no_grad()
def projection_similarity(model: Model, batch: Batch, layer: int, head: int) -> tuple[Tensor, Tensor]:
    """Cosines between the positions of row 0 (T, T): of what enters a layer, and of a head's queries with its keys."""
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
