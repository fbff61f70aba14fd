"""What a small model has learned: every matrix, gain and shift of a forward pass, however the model keeps them.

A linear map is asked what it makes of nothing, which is its bias, and of each unit vector, which is a column of its
matrix. So it does not matter whether its weights are plain, joined with others, packed, adapted or in fewer bits.

    E width, H heads, G key/value heads, D head size, F hidden width, V vocabulary, X experts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import DecoderModel
from heedful.nn.attention import Attention
from heedful.nn.block import Block
from heedful.nn.feedforward import ACTIVATIONS, FeedForward, MixtureOfExperts
from heedful.nn.head import LanguageHead
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Learned


def learned(model: DecoderModel, n_positions: int) -> dict[str, Any]:
    """All of it; of learned positions the first `n_positions`. What the family has not is None."""
    ids = torch.arange(model.config.vocab_size, device=model.device)
    scale, position = model.embed.scale, getattr(model, "position", None)
    table = model.embed(ids)  # (V, E)
    places = torch.arange(min(n_positions, model.longest or n_positions), device=model.device)
    return {
        "embedding": table if scale is None else table / scale,
        "embedding_scale": scale,
        "positions": position(places) if isinstance(position, Learned) else None,
        "layers": [_layer(block, table) for block in model.decoder.blocks if isinstance(block, Block)],
        "norm": _norm(model.decoder.norm),
        "head": _head(model.head, table),
    }


def _layer(block: Block, like: Tensor) -> dict[str, Any]:
    attention, wide = block.attention, _units(like.shape[1], like)
    query, key, value = (_map(lambda x, i=i: projections(attention, x)[i], wide) for i in range(3))  # type: ignore[misc]
    heads = _units(attention.n_heads * attention.d_head, like)
    return {
        "attention_norm": _norm(block.attention_norm),
        "query": query,  # (H·D, E)
        "key": key,  # (G·D, E)
        "value": value,
        "query_norm": _norm(attention.query_norm),
        "key_norm": _norm(attention.key_norm),
        "output": _map(attention.output, heads),
        "attention_after": _norm(block.attention_after),
        "feedforward_norm": _norm(block.feedforward_norm),
        **_network(block.feedforward, wide),
        "feedforward_after": _norm(block.feedforward_after),
    }


def _network(network: nn.Module, wide: Tensor) -> dict[str, Any]:
    """Of a mixture of experts the router alone: each of the experts is a network of its own."""
    found: dict[str, Any] = dict.fromkeys(("act", "gate", "up", "down", "router"))
    if isinstance(network, MixtureOfExperts):
        return found | {"router": _map(network.router, wide)}
    assert isinstance(network, FeedForward), f"what a {type(network).__name__} does is not known here"
    first, second = hidden(network, wide)
    found["act"] = next(name for name, act in ACTIVATIONS.items() if act is network.act)
    found["up" if second is None else "gate"] = _map(lambda x: hidden(network, x)[0], wide)  # (F, E)
    if second is not None:
        found["up"] = _map(lambda x: hidden(network, x)[1], wide)
    return found | {"down": _map(network.down, _units(first.shape[-1], wide))}


def _head(head: nn.Module, like: Tensor) -> dict[str, Any]:
    """What it does to the logits besides, the factor and the cap, is told apart."""
    assert isinstance(head, LanguageHead), "a decoder scores the vocabulary"

    def scores(x: Tensor) -> Tensor:
        found: Tensor = nn.functional.linear(x, head.weight, head.bias) if head.packed is None else head.packed(x)
        return found

    return {**_map(scores, _units(like.shape[1], like)), "scale": head.scale, "softcap": head.softcap}


def _norm(norm: nn.Module | None) -> dict[str, Any] | None:
    """(x - mean) / deviation · gain + shift, or x / rms · gain."""
    if norm is None:
        return None
    if isinstance(norm, RMSNorm):
        return {"kind": "rms", "gain": norm.weight + norm.offset, "shift": None, "eps": norm.eps}
    assert isinstance(norm, nn.LayerNorm), f"a {type(norm).__name__} is not known here"
    return {"kind": "layer", "gain": norm.weight, "shift": norm.bias, "eps": norm.eps}


def _units(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def _map(linear: Callable[[Tensor], Tensor | None], units: Tensor) -> dict[str, Tensor | None]:
    """A linear map's matrix (outputs, inputs), and its bias (outputs,) if it has one that is not 0."""
    bias, columns = linear(torch.zeros_like(units[:1])), linear(units)
    assert bias is not None and columns is not None
    return {"weight": (columns - bias).T, "bias": bias[0] if bool(bias.any()) else None}


# --- what modules do inside, where it may be one product for several maps ---------------------------------------------


def projections(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (..., H·D), keys and values (..., G·D) of x (..., E), before any norm or rotation."""
    if attention.joint is not None:
        widths = [n * attention.d_head for n in (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)]
        query, key, value = attention.joint(x).split(widths, dim=-1)
        return query, key, value
    return attention.query(x), attention.key(x), attention.value(x)


def hidden(network: FeedForward, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What enters the activation (..., F), and what that is multiplied by where the network is gated."""
    if network.joint is not None:
        gate, up = network.joint(x).chunk(2, dim=-1)
        return gate, up
    return (network.up(x), None) if network.gate is None else (network.gate(x), network.up(x))


def experts(network: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each expert's share of each token of x (T, E): (T, X), 0 where it was not asked; and what it says (X, T, E)."""
    shares = network.router(x).softmax(dim=-1, dtype=torch.float32)
    best, chosen = shares.topk(network.top_k, dim=-1)
    if network.renormalize:
        best = best / best.sum(dim=-1, keepdim=True)
    return torch.zeros_like(shares).scatter(-1, chosen, best), torch.stack([e(x) for e in network.experts])
