"""The learned parameters of a small model: every matrix, gain and shift of a forward pass, however they are stored.

A linear map is applied to zero, which gives its bias, and to each unit vector, which gives a column of its matrix. So
it does not matter whether its weights are plain, fused with others, packed, quantized or have a LoRA adapter.

    E width, H heads, G key/value heads, D head size, F hidden width, V vocabulary, X experts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heedful.kernels.modules import PackedAttention, PackedFeedForward
from heedful.models.base import DecoderModel
from heedful.nn.attention import Attention
from heedful.nn.block import Block
from heedful.nn.feedforward import ACTIVATIONS, FeedForward, MixtureOfExperts
from heedful.nn.head import LanguageHead
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Learned


def learned_parameters(model: DecoderModel, n_positions: int) -> dict[str, Any]:
    """All of them, the first `n_positions` of learned positions; None for what the family does not have."""
    ids = torch.arange(model.config.vocab_size, device=model.device)
    scale, position = model.embed.scale, getattr(model, "position", None)
    table = model.embed(ids)  # (V, E)
    positions = torch.arange(min(n_positions, model.context_length or n_positions), device=model.device)
    return {
        "embedding": table if scale is None else table / scale,
        "embedding_scale": scale,
        "positions": position(positions) if isinstance(position, Learned) else None,
        "layers": [_layer(block, table) for block in model.decoder.blocks if isinstance(block, Block)],
        "norm": _norm(model.decoder.norm),
        "head": _head(model.head, table),
    }


def _layer(block: Block, like: Tensor) -> dict[str, Any]:
    attention, wide = block.attention, _identity(like.shape[1], like)
    query, key, value = (_map(lambda x, i=i: qkv_projections(attention, x)[i], wide) for i in range(3))  # type: ignore[misc]
    heads = _identity(attention.n_heads * attention.d_head, like)
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
        **_feedforward(block.feedforward, wide),
        "feedforward_after": _norm(block.feedforward_after),
    }


def _feedforward(network: nn.Module, wide: Tensor) -> dict[str, Any]:
    """Of a mixture of experts only the router: each expert is a network of its own."""
    found: dict[str, Any] = dict.fromkeys(("act", "gate", "up", "down", "router"))
    if isinstance(network, MixtureOfExperts):
        return found | {"router": _map(network.router, wide)}
    assert isinstance(network, FeedForward), f"what a {type(network).__name__} does is not known here"
    first, second = feedforward_hidden(network, wide)
    found["act"] = next(name for name, act in ACTIVATIONS.items() if act is network.act)
    found["up" if second is None else "gate"] = _map(lambda x: feedforward_hidden(network, x)[0], wide)  # (F, E)
    if second is not None:
        found["up"] = _map(lambda x: feedforward_hidden(network, x)[1], wide)
    return found | {"down": _map(network.down, _identity(first.shape[-1], wide))}


def _head(head: nn.Module, like: Tensor) -> dict[str, Any]:
    """Its matrix, and apart from it the scale and the soft cap of the logits."""
    assert isinstance(head, LanguageHead), "a decoder scores the vocabulary"

    return {**_map(head.project, _identity(like.shape[1], like)), "scale": head.scale, "softcap": head.softcap}


def _norm(norm: nn.Module | None) -> dict[str, Any] | None:
    """(x - mean) / deviation · gain + shift, or x / rms · gain."""
    if norm is None or isinstance(norm, nn.Identity):
        return None
    if isinstance(norm, RMSNorm):
        return {"kind": "rms", "gain": norm.weight + norm.offset, "shift": None, "eps": norm.eps}
    assert isinstance(norm, nn.LayerNorm), f"a {type(norm).__name__} is not known here"
    return {"kind": "layer", "gain": norm.weight, "shift": norm.bias, "eps": norm.eps}


def _identity(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def _map(linear: Callable[[Tensor], Tensor | None], identity: Tensor) -> dict[str, Tensor | None]:
    """A linear map's matrix (outputs, inputs), and its bias (outputs,) if it has one that is not 0."""
    bias, columns = linear(torch.zeros_like(identity[:1])), linear(identity)
    assert bias is not None and columns is not None
    return {"weight": (columns - bias).T, "bias": bias[0] if bool(bias.any()) else None}


# --- inside modules, where several maps may be fused into one product ------------------------------------------------


def qkv_projections(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (..., H·D), keys and values (..., G·D) of x (..., E), before any norm or rotation."""
    if isinstance(attention, PackedAttention):
        widths = [n * attention.d_head for n in (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)]
        query, key, value = attention.joint(x).split(widths, dim=-1)
        return query, key, value
    return attention.query(x), attention.key(x), attention.value(x)


def feedforward_hidden(network: FeedForward, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The input of the activation (..., F), and its multiplier in a gated network."""
    if isinstance(network, PackedFeedForward):
        gate, up = network.joint(x).chunk(2, dim=-1)
        return gate, up
    return (network.up(x), None) if network.gate is None else (network.gate(x), network.up(x))


def expert_outputs(network: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of each expert for each token of x (T, E): (T, X), 0 where not chosen; and its output (X, T, E)."""
    shares = network.router(x).softmax(dim=-1, dtype=torch.float32)
    best, chosen = shares.topk(network.top_k, dim=-1)
    if network.renormalize:
        best = best / best.sum(dim=-1, keepdim=True)
    return torch.zeros_like(shares).scatter(-1, chosen, best), torch.stack([e(x) for e in network.experts])
