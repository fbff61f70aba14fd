"""One layer of a Transformer: attention, perhaps cross-attention, feed-forward, each with residual and norm.

pre       x + f(norm(x))              GPT-2, LLaMA, T5, ViT; with a norm after f too: Gemma 2;
                                      with only the norm after f: OLMo 2
post      norm(x + f(x))              the original, GPT-1, BERT
parallel  x + attn(n1(x)) + ff(n2(x)) GPT-J (n2 is n1), GPT-NeoX
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from heedful.kernels.cpu import block as training
from heedful.nn.attention import Attention, View
from heedful.nn.state import Cache, CrossCache

Residual = Literal["pre", "post", "parallel"]


@dataclass
class Norms:
    """The norms of a block by place; what a family does not have stays None."""

    attention: nn.Module | None = None  # before attention (pre, parallel), after the sum (post)
    feedforward: nn.Module | None = None
    cross: nn.Module | None = None
    attention_after: nn.Module | None = None  # on the sublayer's output, before the sum
    feedforward_after: nn.Module | None = None


class Block(nn.Module):
    def __init__(
        self,
        attention: Attention,
        feedforward: nn.Module,
        norms: Norms,
        residual: Residual = "pre",
        cross: Attention | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if residual not in ("pre", "post", "parallel"):
            raise ValueError(f"residual {residual!r} is not pre, post or parallel")
        self.residual = residual
        self.attention_norm, self.attention = norms.attention, attention
        self.attention_after = norms.attention_after
        self.cross_norm, self.cross = norms.cross, cross
        self.feedforward_norm, self.feedforward = norms.feedforward, feedforward
        self.feedforward_after = norms.feedforward_after
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        view: View,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        memory_view: View | None = None,
        memory_cache: CrossCache | None = None,
    ) -> Tensor:
        if cache is None and memory is None and training.can(self, x, view):
            return training.run(self, x, view)
        if self.residual == "parallel":
            normed = _apply(self.attention_norm, x)
            seen = self.attention(normed, view, cache)
            thought = self.feedforward(normed if self.feedforward_norm is None else self.feedforward_norm(x))
            return x + self.dropout(seen) + self.dropout(thought)

        y = self.attention(self._before(self.attention_norm, x), view, cache)
        x = self._after(self.attention_norm, x, _apply(self.attention_after, y))
        if self.cross is not None:
            assert memory_view is not None, "a block with cross-attention is told how to see the memory"
            y = self.cross(self._before(self.cross_norm, x), memory_view, memory_cache, memory)
            x = self._after(self.cross_norm, x, y)
        y = self.feedforward(self._before(self.feedforward_norm, x))
        return self._after(self.feedforward_norm, x, _apply(self.feedforward_after, y))

    def _before(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        return _apply(norm, x) if self.residual == "pre" else x

    def _after(self, norm: nn.Module | None, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.dropout(y)
        return _apply(norm, x) if self.residual == "post" else x


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
