"""Attention: softmax(QKᵀ/√d) V (Vaswani et al. 2017, section 3.2), for all families.

`attend` calls PyTorch's fused kernels; `attend_explicit` computes the same step by step, for hooks on intermediate
values and for what no fused kernel has (Gemma 2's soft cap). `Attention` is the layer: projections, heads, rotary
positions, query and key norms, grouped queries, sliding windows; self- or cross-attention.

    B batch, T target, S source, H query heads, G key/value heads, D head size, E model width
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.nn.mask import Mask
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Rotation
from heedful.nn.state import Cache, CrossCache


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(QKᵀ · scale + bias) V of queries (B, H, T, D), keys and values (B, G, S, D): (B, H, T, D).

    `mask` is True where a query may attend, `bias` is added to the scores, `scale` is 1/√D unless given.
    G may divide H: each key/value head then serves H/G query heads (grouped queries, Ainslie et al. 2023).
    """
    if bias is not None:
        if causal:
            mask = Mask(q.shape[-2], k.shape[-2], causal=True, device=q.device).dense()
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def attend_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    softcap: float | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """`attend` step by step; hooks on `watch` may read and replace queries, keys, values, scores, weights, output."""
    if watch is not None:
        q, k, v = watch.queries(q), watch.keys(k), watch.values(v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if causal:
        mask = Mask(q.shape[-2], k.shape[-2], causal=True, device=q.device).dense()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-2, -1) * scale  # (B, H, T, S)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    weights = softmax_weights(scores, mask, watch)
    out = F.dropout(weights, dropout) @ v if dropout else weights @ v
    return out if watch is None else watch.heads(out)


def softmax_weights(scores: Tensor, mask: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """Softmax of scores (B, H, T, S) over the keys, in at least float32; masked keys get weight 0."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if watch is not None:
        scores = watch.scores(scores)
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=precise).to(scores.dtype)
    return weights if watch is None else watch.weights(weights)


class Watch(nn.Module):
    """Hook points for the intermediate values that fused kernels do not return, used while `on`: `queries` and `heads`
    (B, H, T, D), `keys` and `values` (B, G, S, D), rotated and including cached ones, `scores` and `weights`
    (B, H, T, S).
    """

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.queries, self.keys, self.values = nn.Identity(), nn.Identity(), nn.Identity()
        self.scores, self.weights, self.heads = nn.Identity(), nn.Identity(), nn.Identity()


@dataclass
class AttentionInfo:
    """The inputs of a forward pass that all attention layers share: mask, positions, encoder output."""

    mask: Mask
    rotation: Rotation | None = None
    bias: Tensor | None = None  # (B or 1, H or 1, T, S), added to the scores
    memory: Tensor | None = None  # (B, S, E) the encoder's output; None in self-attention, or once its keys are cached
    counts: list[int] | None = None  # number of real tokens in each row of a padded batch


class Attention(nn.Module):
    """Multi-head attention with separate query, key, value and output projections."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if d_head is None and d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}: set d_head")
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.d_head = d_head or d_model // n_heads
        if n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        self.scale, self.window, self.softcap, self.dropout = scale, window, softcap, dropout
        self.query = nn.Linear(d_model, n_heads * self.d_head, bias)
        self.key = nn.Linear(d_model, self.n_kv_heads * self.d_head, bias)
        self.value = nn.Linear(d_model, self.n_kv_heads * self.d_head, bias)
        self.output = nn.Linear(n_heads * self.d_head, d_model, bias if output_bias is None else output_bias)
        self.query_norm, self.key_norm = query_norm, key_norm
        self.watch = Watch()

    def forward(self, x: Tensor, info: AttentionInfo, cache: Cache | CrossCache | None = None) -> Tensor:
        """x (B, T, E) -> (B, T, E), attending to itself and the cached positions, or to `info.memory` (B, S, E)."""
        q, k, v = self._project(x, info, cache)  # (B, H, T, D), (B, G, S, D)
        if info.rotation is not None:
            q, k = info.rotation(q), info.rotation(k)
        if isinstance(cache, Cache):
            k, v = cache.extend(k, v, info.counts)
        causal = info.mask.is_plain_causal(self.window)
        mask = None if causal else info.mask.dense(self.window)
        out = self.attend(q, k, v, mask, info.bias, causal=causal)
        return self.output(out.transpose(1, 2).flatten(2))  # (B, T, E)

    def _project(
        self, x: Tensor, info: AttentionInfo, cache: Cache | CrossCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(cache, CrossCache):
            if cache.empty:
                assert info.memory is not None, "an empty cross-attention cache is filled from the memory"
                cache.fill(*self.keys_values(info.memory))
            return self.queries(x), *cache.read()
        if info.memory is not None:
            return self.queries(x), *self.keys_values(info.memory)
        return self.queries_keys_values(x)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, *, causal: bool
    ) -> Tensor:
        """`attend` with this layer's scale and dropout; `attend_explicit` if `watch` is on or there is a soft cap."""
        dropout = self.dropout if self.training else 0.0
        if not self.watch.on and self.softcap is None:
            return attend(q, k, v, mask, bias, self.scale, causal=causal, dropout=dropout)
        watch = self.watch if self.watch.on else None
        return attend_explicit(
            q, k, v, mask, bias, self.scale, causal=causal, dropout=dropout, softcap=self.softcap, watch=watch
        )

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D) of x (B, T, E)."""
        return self.queries(x), *self.keys_values(x)

    def queries(self, x: Tensor) -> Tensor:
        """Queries of x (B, T, E), (B, H, T, D)."""
        return self._split(self.query(x), self.query_norm, self.n_heads)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of x (B, S, E), each (B, G, S, D)."""
        k = self._split(self.key(x), self.key_norm, self.n_kv_heads)
        return k, self._heads(self.value(x), self.n_kv_heads)

    def _heads(self, x: Tensor, n_heads: int) -> Tensor:
        return x.unflatten(-1, (n_heads, self.d_head)).transpose(1, 2)

    def _split(self, x: Tensor, norm: RMSNorm | None, n_heads: int) -> Tensor:
        """Split into heads; a norm of head size normalizes each head (Qwen 3), a wider one all of them (OLMo 2)."""
        if norm is None:
            return self._heads(x, n_heads)
        if norm.weight.shape[0] == self.d_head:
            return norm(self._heads(x, n_heads))
        return self._heads(norm(x), n_heads)
