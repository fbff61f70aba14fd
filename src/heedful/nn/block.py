"""One layer of a Transformer: attention, optional cross-attention, feed-forward, each with residual and norm.

PreNormBlock   x + f(norm(x))               GPT-2, LLaMA, T5, ViT; x + norm(f(norm(x))): Gemma 2;
                                            x + norm(f(x)): OLMo 2
PostNormBlock  norm(x + f(x))               the original, GPT-1, BERT
ParallelBlock  x + attn(n1(x)) + ff(n2(x))  GPT-J (n2 is n1), GPT-NeoX

B batch, T positions, E model width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from heedful.nn.attention import Attention, AttentionInfo
from heedful.nn.state import Cache, CrossCache


@dataclass
class Norms:
    """The norms of a block by position, None where a family has none."""

    attention: nn.Module | None = None  # before attention (pre, parallel), after the sum (post)
    feedforward: nn.Module | None = None
    cross: nn.Module | None = None
    attention_after: nn.Module | None = None  # on the sublayer's output, before the sum
    feedforward_after: nn.Module | None = None


class Cross(NamedTuple):
    """The inputs of cross-attention in a forward pass: mask and encoder output, and its cache."""

    info: AttentionInfo
    cache: CrossCache | None = None


class Block(nn.Module):
    """The sublayers and norms of a layer; subclasses define the order. An absent norm is the identity."""

    def __init__(
        self,
        attention: Attention,
        feedforward: nn.Module,
        norms: Norms,
        cross: Attention | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = norms.attention or nn.Identity(), attention
        self.attention_after = norms.attention_after or nn.Identity()
        self.cross_norm, self.cross = norms.cross or nn.Identity(), cross
        self.feedforward_norm, self.feedforward = norms.feedforward or nn.Identity(), feedforward
        self.feedforward_after = norms.feedforward_after or nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, info: AttentionInfo, cache: Cache | None = None, cross: Cross | None = None) -> Tensor:
        """x (B, T, E) -> (B, T, E); `cross` has the inputs of cross-attention in encoder-decoders."""
        raise NotImplementedError


class PreNormBlock(Block):
    """x + f(norm(x)), or with a norm after f too (Gemma 2), or only there (OLMo 2)."""

    def forward(self, x: Tensor, info: AttentionInfo, cache: Cache | None = None, cross: Cross | None = None) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        x = x + self.dropout(self.attention_after(self.attention(self.attention_norm(x), info, cache)))
        if self.cross is not None and cross is not None:
            x = x + self.dropout(self.cross(self.cross_norm(x), *cross))
        return x + self.dropout(self.feedforward_after(self.feedforward(self.feedforward_norm(x))))


class PostNormBlock(Block):
    """norm(x + f(x)), as in the original Transformer."""

    def forward(self, x: Tensor, info: AttentionInfo, cache: Cache | None = None, cross: Cross | None = None) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        x = self.attention_norm(x + self.dropout(self.attention(x, info, cache)))
        if self.cross is not None and cross is not None:
            x = self.cross_norm(x + self.dropout(self.cross(x, *cross)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))


class ParallelBlock(Block):
    """x + attention(norm(x)) + feedforward(norm(x)), with one norm for both or one for each."""

    def __init__(self, attention: Attention, feedforward: nn.Module, norms: Norms, *, dropout: float = 0.0) -> None:
        super().__init__(attention, feedforward, norms, dropout=dropout)
        self.shares_norm = norms.feedforward is None

    def forward(self, x: Tensor, info: AttentionInfo, cache: Cache | None = None, cross: Cross | None = None) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        normed = self.attention_norm(x)
        second = normed if self.shares_norm else self.feedforward_norm(x)
        return x + self.dropout(self.attention(normed, info, cache)) + self.dropout(self.feedforward(second))
