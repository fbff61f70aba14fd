"""How one query finds its keys: the neuron view of BertViz (Vig 2019), with the numbers of a real forward pass.

T keys, D head size
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from heedful.models.base import Model
from heedful.models.seq2seq import Seq2Seq
from heedful.nn.attention import Attention
from heedful.serve.playground.recompute import attention_module

ACTIVATIONS_NEEDED = ("queries", "keys", "scores", "weights")
PRODUCT_SCORES = ("dot", "general")  # kinds of recurrent attention whose score is a product of query and key


def neuron_view(activations: list[Tensor], scale: float, head: int, index: int) -> dict[str, Any]:
    """Query `index` of a head, all keys, products by dimension, scores and weights, from a layer's ACTIVATIONS_NEEDED.

    A score is the sum of its products times `scale`, plus a position bias if the model has one; it is None where the
    mask forbids it.
    """
    queries, keys, scores, weights = activations
    n_heads, n_rows = queries.shape[:2]
    if head >= n_heads or index >= n_rows:
        what, given, count = ("head", head, n_heads) if head >= n_heads else ("token", index, n_rows)
        raise ValueError(f"there is no {what} {given}: there are 0 to {count - 1}")
    query, key = queries[head, index], keys[head * len(keys) // n_heads]  # (D,), (T, D); grouped heads share keys
    finite: list[float | None] = [s if math.isfinite(s) else None for s in scores[head, index].tolist()]
    return {
        "query": query.tolist(),
        "keys": key,
        "products": query * key,
        "scores": finite,
        "weights": weights[head, index].tolist(),
        "scale": scale,
    }


def score_scale(model: Model, name: str) -> float:
    """The factor between a query-key product and its score, for the layer whose weights have this name."""
    if isinstance(model, Seq2Seq):
        if model.config.attention not in PRODUCT_SCORES:
            raise ValueError(
                f"this model compares by {model.config.attention}, a small network: there are no products to show"
            )
        return 1.0
    part = attention_module(model, name)
    assert isinstance(part, Attention)
    return 1 / math.sqrt(part.d_head) if part.scale is None else part.scale
