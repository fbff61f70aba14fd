"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3), its gated form, and mixture of experts.

B batch, T positions, E model width, F hidden width, X experts
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks & Gimpel 2016), as in GPT."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702x), the approximation of GELU in image GPT and CLIP."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021)."""
    return F.relu(x).square()


# By their names in the hub's configs.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "relu2": relu_squared,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function of this name; ValueError if there is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known: {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


class FeedForward(nn.Module):
    """down(act(up(x))), or gated down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        act: str,
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.up = nn.Linear(d_model, d_ff, bias)
        self.gate = nn.Linear(d_model, d_ff, bias) if gated else None
        self.down = nn.Linear(d_ff, d_model, bias)
        self.dropout = nn.Dropout(dropout)  # between the two layers (T5); the block has its own

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))  # (B, T, F) -> (B, T, E)


class MixtureOfExperts(nn.Module):
    """A router sends each token to its `top_k` experts and sums their weighted outputs (Shazeer et al. 2017).

    The weights are the softmax over all experts, with `renormalize` scaled to sum to 1 over the chosen (Mixtral).
    """

    def __init__(self, d_model: int, experts: list[FeedForward], *, top_k: int, renormalize: bool = True) -> None:
        super().__init__()
        if not 1 <= top_k <= len(experts):
            raise ValueError(f"top_k {top_k} of {len(experts)} experts")
        self.top_k, self.renormalize = top_k, renormalize
        self.router = nn.Linear(d_model, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        flat = x.flatten(0, -2)  # (B·T, E)
        weights = self.router(flat).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = weights.topk(self.top_k, dim=-1)  # (B·T, top_k)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, rank = torch.where(chosen == number)
            if len(tokens) or self.training:  # in training, an unused expert gets a gradient of 0 instead of None
                weighted = expert(flat[tokens]) * weights[tokens, rank, None].to(flat.dtype)
                out.index_add_(0, tokens, weighted)
        return out.view_as(x)
