"""What a model says with its last hidden states.

`LanguageHead` scores every token of the vocabulary; `MaskedHead` is BERT's, with a layer of its own before it;
`Pooler` makes one vector of a sequence, which a linear layer then labels.

    B batch, T positions, E model width, V vocabulary, C labels
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
        self.packed: nn.Module | None = None  # does the product in place of the two (weights.pack)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * self.scale
        if self.packed is not None:
            logits = self.packed(x)
        else:
            logits = nn.functional.linear(x, self.weight, self.bias)  # (..., V)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class MaskedHead(nn.Module):
    """BERT's: dense, activation, norm, then the tied vocabulary with a bias of its own."""

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        act: str,
        eps: float,
        *,
        tied: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, d_model)
        self.act = activation(act)
        self.norm = nn.LayerNorm(d_model, eps)
        self.vocabulary = LanguageHead(d_model, vocab_size, tied=tied, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary(self.norm(self.act(self.dense(x))))


class Pooler(nn.Module):
    """The first position's vector through one layer: (B, T, E) -> (B, E); RoBERTa drops out some of its input."""

    def __init__(self, d_model: int, act: str = "tanh", *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(d_model, d_model)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(self.dropout(x[:, 0])))
