"""A pile of blocks: the encoder of BERT, the decoder of GPT, either half of T5.

B batch, T positions, S positions of the memory, E model width
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.nn.attention import View
from heedful.nn.block import Block
from heedful.nn.mask import Mask
from heedful.nn.position import Alibi, RelativeBias, Rotary
from heedful.nn.state import KeyValueState


class Stack(nn.Module):
    """Blocks one after the other, with the mask and the relative positions they share, and a last norm."""

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        causal: bool,
        norm: nn.Module | None = None,
        rotary: Rotary | None = None,
        bias: RelativeBias | Alibi | None = None,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.rotary, self.bias = norm, rotary, bias
        self.recompute = False  # in training keep only what enters each block, and compute the rest again (Chen 2016)
        self.fused: Any = None  # all blocks as one for a step of one token: a decode.Fused (weights.pack)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        state: KeyValueState | None = None,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, E) at `positions` (B or 1, T), of which the first `lengths` (B,) are real, the rest padding.

        With a `state` the T positions follow those it remembers. `memory` (B, S, E) is what cross-attention reads;
        once the state holds its keys and values it is no longer needed.
        """
        n, device = x.shape[1], x.device
        starts = 0 if state is None else state.starts
        n_keys = n if state is None else state.n_keys(n)
        mask = Mask(
            n,
            n_keys,
            causal=self.causal,
            starts=starts,
            lengths=None if self.causal else lengths,
            documents=documents,
            device=device,
        )
        view = View(mask)
        if self.rotary is not None:
            view.rotation = self.rotary(positions, self._reach(n, starts, lengths, documents, device))
        if self.bias is not None:
            view.bias = self.bias(places(starts, n, device), torch.arange(n_keys, device=device))
            view.bias = view.bias.to(x.dtype)
        if self.fused is not None and self.fused.can(x, state):
            x = self.fused(x, view, state)
            return x if self.norm is None else self.norm(x)
        memory_view = self._memory_view(n, state, memory, memory_lengths)
        for i, block in enumerate(self.blocks):
            cache = state.caches[i] if state is not None else None
            cross = state.cross[i] if state is not None and state.cross else None
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, view, cache, memory, memory_view, cross, use_reentrant=False)
            else:
                x = block(x, view, cache, memory, memory_view, cross)
        return x if self.norm is None else self.norm(x)

    def _reach(
        self,
        n: int,
        starts: int | list[int],
        lengths: Tensor | None,
        documents: Tensor | None,
        device: torch.device,
    ) -> int | Tensor:
        """How long each token's sequence is by now, (B or 1, T or 1), for a rotation that depends on it."""
        if self.rotary is None or self.rotary.original is None:
            return n
        if documents is not None:
            return (documents[:, :, None] == documents[:, None, :]).sum(dim=-1)
        new = n if lengths is None else lengths[:, None]
        return torch.as_tensor(starts, device=device).view(-1, 1) + new

    @staticmethod
    def _memory_view(n: int, state: KeyValueState | None, memory: Tensor | None, lengths: Tensor | None) -> View | None:
        if memory is not None:
            n_keys, device = memory.shape[1], memory.device
        elif state is not None and state.cross:
            n_keys, device = state.cross[0].keys.shape[2], state.cross[0].keys.device
        else:
            return None
        if state is not None:
            lengths = state.memory_lengths
        return View(Mask(n, n_keys, causal=False, lengths=lengths, device=device))


def places(starts: int | list[int], n: int, device: torch.device) -> Tensor:
    """Positions of n tokens that begin at `starts`: (1, n), or (B, n) where rows differ."""
    if isinstance(starts, int):
        return torch.arange(starts, starts + n, device=device)[None]
    begin = torch.as_tensor(starts, device=device).view(-1, 1)
    return begin + torch.arange(n, device=device)
