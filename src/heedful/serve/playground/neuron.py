"""How one query finds its keys: the neuron view of BertViz (Vig 2019), with the numbers of a real pass.

T keys, D head size
"""

from __future__ import annotations

import math
from typing import Any

from heedful.models.base import Batch, Model
from heedful.models.seq2seq import Seq2Seq
from heedful.nn.attention import Attention
from heedful.observe.capture import capture

MULTIPLIED = ("dot", "general")  # recurrent scores that are a product


def neuron(model: Model, batch: Batch, name: str, head: int, index: int) -> dict[str, Any]:
    """Query `index` of a head, all keys, their products by dimension, the scores and the weights.

    `name` is that of the layer's weights. A score is the sum of its products times `scale`, and what a bias by
    distance adds; it is None where looking is not allowed.
    """
    scale = scale_of(model, name)
    base = name.removesuffix(".weights")
    places = [f"{base}.{what}" for what in ("queries", "keys", "scores", "weights")]
    with capture(model, places) as acts:
        model(batch)
    queries, keys, scores, weights = (acts[place][0].float().cpu() for place in places)
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
    half, layer, which, _ = name.split(".")
    block = model.get_submodule(f"{half}.blocks.{layer}")
    part = block.cross if which == "cross" else block.attention
    assert isinstance(part, Attention)
    return 1 / math.sqrt(part.d_head) if part.scale is None else part.scale
