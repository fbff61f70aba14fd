"""What a model says with its last hidden states.

`LanguageHead` scores every token of the vocabulary; `Pooler` makes one vector of a sequence. The heads of encoders are
made from them in models/heads.py.

    B batch, T positions, E model width, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful.nn.feedforward import activation


class LanguageHead(nn.Module):
    """Logits over the vocabulary; give it the embedding's weight to tie the two (Press & Wolf 2017)."""

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        tied: nn.Parameter | None = None,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.softcap = scale, softcap
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if tied is None else tied
        if tied is None:
            nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> logits (..., V)."""
        if self.scale is not None:
            x = x * self.scale
        logits = self.project(x)  # (..., V)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def project(self, x: Tensor) -> Tensor:
        """x (..., E) times the matrix of the vocabulary, before the soft cap: (..., V)."""
        return nn.functional.linear(x, self.weight, self.bias)


class Pooler(nn.Module):
    """The first position's vector through one layer; RoBERTa has dropout before it."""

    def __init__(self, d_model: int, act: str = "tanh", *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(d_model, d_model)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., T, E) -> (..., E)."""
        return self.act(self.dense(self.dropout(x[..., 0, :])))


class FirstPosition(nn.Module):
    """The first position's vector as it is (ViT)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., T, E) -> (..., E)."""
        return x[..., 0, :]
