"""The position encoding of a model: added vectors, rotary angles, or a bias of the attention scores by distance.

T positions, E width, R rotated dimensions, H heads
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from heedful.models.base import Model
from heedful.nn.position import Sinusoidal
from heedful.nn.stack import Stack
from heedful.observe.names import stack_names

INITIAL = 0.02  # standard deviation of learned positions before training


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
    stack = getattr(model, stack_names(model)[-1], None)
    if model.device.type == "meta":
        return _without_weights(model, added, stack, n)
    return _encoding(model, added, stack, n, model.device)


def _without_weights(model: Model, added: object, stack: object, n: int) -> PositionEncoding:
    """The encoding of a model of shapes alone: what is computed as it is, what is learned as before training."""
    learned = [added] if isinstance(added, nn.Parameter) else []
    modules = [added, getattr(stack, "rotary", None), getattr(stack, "bias", None)]
    for module in [x for x in modules if isinstance(x, nn.Module)]:
        learned += module.to_empty(device="cpu").parameters()
    generator = torch.Generator().manual_seed(0)
    new = [torch.empty(part.shape).normal_(std=INITIAL, generator=generator) for part in learned]
    if isinstance(added, nn.Parameter):
        added = nn.Parameter(new[0])
    else:
        for part, values in zip(learned, new, strict=True):
            part.copy_(values)
    found = _encoding(model, added, stack, n, torch.device("cpu"))
    return replace(found, about=found.about + ", before training") if learned else found


def _encoding(model: Model, added: object, stack: object, n: int, device: torch.device) -> PositionEncoding:
    if isinstance(added, nn.Parameter):
        return PositionEncoding("learned", added.detach().float().cpu(), "learned positions of [CLS] and the patches")
    if isinstance(added, nn.Module):
        n = min(n, model.context_length or n)
        values = added(torch.arange(n, device=device)).float().cpu()
        fixed = isinstance(added, Sinusoidal)
        return PositionEncoding(
            "sinusoidal" if fixed else "learned", values, f"{'sinusoidal' if fixed else 'learned'} positions"
        )
    if isinstance(stack, Stack) and stack.rotary is not None:
        turn = stack.rotary(torch.arange(n, device=device)[None], n)
        return PositionEncoding("rotary", turn.cos[0, 0].float().cpu(), "cosine of each pair's rotation")
    if isinstance(stack, Stack) and stack.bias is not None:
        distance = torch.arange(-n + 1, n, device=device)
        keys = distance - distance[0]
        values = stack.bias(torch.tensor([[n - 1]], device=device), keys)[0, :, 0].float().cpu()
        return PositionEncoding("bias", values[:, :n] if stack.causal else values, "what distance adds to the scores")
    raise ValueError(f"a {model.family} model has no positions: it reads one token after the other, or as a bag")
