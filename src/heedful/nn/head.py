"""Output heads: `LanguageHead` gives logits over the vocabulary, `LabelHead` over labels; `Pooler` and `FirstPosition`
a vector per sequence.

The task heads of encoders are built from them in models/heads.py.

    B batch, T positions, E model width, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful.nn.feedforward import activation


class LanguageHead(nn.Module):
    """Logits over the vocabulary; `tied` is the embedding's weight, to share it (Press & Wolf 2017)."""

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
        """The projection x (..., E) -> (..., V), before the soft cap."""
        return nn.functional.linear(x, self.weight, self.bias)


class Pooler(nn.Module):
    """act(W x + b) of the first position (BERT's [CLS]); RoBERTa has dropout before it."""

    def __init__(self, d_model: int, act: str = "tanh", *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(d_model, d_model)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., T, E) -> (..., E)."""
        return self.act(self.dense(self.dropout(x[..., 0, :])))


class LabelHead(nn.Module):
    """Logits of L labels from one vector per sequence, without a bias: a decoder's classifier."""

    def __init__(self, d_model: int, n_labels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(d_model, n_labels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., L)."""
        return self.classifier(x)


class FirstPosition(nn.Module):
    """The first position's vector, unchanged (ViT)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., T, E) -> (..., E)."""
        return x[..., 0, :]
