"""The position encoding of a model: added vectors, rotary angles, or a bias of the attention scores by distance.

T positions, E width, R rotated dimensions, H heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from heedful.models.base import Model
from heedful.nn.position import Sinusoidal
from heedful.nn.stack import Stack
from heedful.observe.names import stack_names


@dataclass(frozen=True)
class PositionEncoding:
    """`values` are added vectors (T, E), cosines of rotary angles (T, R/2), or biases by distance (H, 2 T - 1)."""

    kind: Literal["sinusoidal", "learned", "rotary", "bias"]
    values: Tensor
    about: str


@torch.no_grad()
def position_encoding(model: Model, n: int = 50) -> PositionEncoding:
    """The encoding of the first n positions; of a ViT, of all its patches."""
    if n < 1:
        raise ValueError(f"{n} positions: there must be 1 at least")
    added = getattr(model, "position", None)
    if isinstance(added, nn.Parameter):
        return PositionEncoding("learned", added.detach().float().cpu(), "learned positions of [CLS] and the patches")
    if isinstance(added, nn.Module):
        n = min(n, model.context_length or n)
        values = added(torch.arange(n, device=model.device)).float().cpu()
        fixed = isinstance(added, Sinusoidal)
        return PositionEncoding(
            "sinusoidal" if fixed else "learned", values, f"{'sinusoidal' if fixed else 'learned'} positions"
        )
    stack = getattr(model, stack_names(model)[-1], None)
    if isinstance(stack, Stack) and stack.rotary is not None:
        turn = stack.rotary(torch.arange(n, device=model.device)[None], n)
        return PositionEncoding("rotary", turn.cos[0, 0].float().cpu(), "cosine of each pair's rotation")
    if isinstance(stack, Stack) and stack.bias is not None:
        distance = torch.arange(-n + 1, n, device=model.device)
        keys = distance - distance[0]
        values = stack.bias(torch.tensor([[n - 1]], device=model.device), keys)[0, :, 0].float().cpu()
        return PositionEncoding("bias", values[:, :n] if stack.causal else values, "what distance adds to the scores")
    raise ValueError(f"a {model.family} model has no positions: it reads one token after the other, or as a bag")
