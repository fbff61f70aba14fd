"""How one query finds its keys: the neuron view of BertViz (Vig 2019), with the numbers of a real pass.

T keys, D head size
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from heedful.models.base import Model
from heedful.models.seq2seq import Seq2Seq
from heedful.nn.attention import Attention
from heedful.serve.playground.passes import computing

PARTS = ("queries", "keys", "scores", "weights")
MULTIPLIED = ("dot", "general")  # recurrent scores that are a product


def neuron(parts: list[Tensor], scale: float, head: int, index: int) -> dict[str, Any]:
    """Query `index` of a head, all keys, their products by dimension, the scores and the weights; of a layer's PARTS.

    A score is the sum of its products times `scale`, and what a bias by distance adds; it is None where looking is not
    allowed.
    """
    queries, keys, scores, weights = parts
    n_heads, n_rows = queries.shape[:2]
    if head >= n_heads or index >= n_rows:
        what, given, count = ("head", head, n_heads) if head >= n_heads else ("token", index, n_rows)
        raise ValueError(f"there is no {what} {given}: there are 0 to {count - 1}")
    query, key = queries[head, index], keys[head * len(keys) // n_heads]  # (D,), (T, D); groups share keys
    told: list[float | None] = [s if math.isfinite(s) else None for s in scores[head, index].tolist()]
    return {
        "query": query.tolist(),
        "keys": key,
        "products": query * key,
        "scores": told,
        "weights": weights[head, index].tolist(),
        "scale": scale,
    }


def scale_of(model: Model, name: str) -> float:
    """By what products become scores."""
    if isinstance(model, Seq2Seq):
        if model.config.attention not in MULTIPLIED:
            raise ValueError(
                f"this model compares by {model.config.attention}, a small network: there are no products to show"
            )
        return 1.0
    part = computing(model, name)
    assert isinstance(part, Attention)
    return 1 / math.sqrt(part.d_head) if part.scale is None else part.scale
