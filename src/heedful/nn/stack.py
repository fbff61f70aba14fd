"""The stack of blocks of an encoder or decoder, with what they share: mask, relative positions, final norm.

B batch, T positions, S positions of the memory, E model width
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.nn.attention import AttentionInfo
from heedful.nn.block import Block, Cross
from heedful.nn.mask import Mask
from heedful.nn.position import Alibi, RelativeBias, Rotary
from heedful.nn.state import KeyValueState


class Stack(nn.Module):
    """A sequence of blocks with a shared mask and relative positions, and a final norm."""

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
        self.recompute = False  # activation checkpointing (Chen et al. 2016): store only each block's input

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
        """x (B, T, E) at `positions` (B or 1, T) -> (B, T, E); of row b the first `lengths[b]` tokens are real.

        With a `state` the T tokens follow the cached ones. `memory` (B, S, E) is the encoder's output for
        cross-attention, not needed once the state has cached its keys and values.
        """
        info = self._info(x, positions, state, lengths, documents)
        x = self.run_blocks(x, info, state, self._cross_info(x, state, memory, memory_lengths))
        return x if self.norm is None else self.norm(x)

    def run_blocks(
        self, x: Tensor, info: AttentionInfo, state: KeyValueState | None, cross_info: AttentionInfo | None
    ) -> Tensor:
        """x (B, T, E) -> (B, T, E) through the blocks, each with its layer's caches."""
        for i, block in enumerate(self.blocks):
            cache = None if state is None else state.caches[i]
            cross = None
            if cross_info is not None:
                cross = Cross(cross_info, state.cross[i] if state is not None and state.cross else None)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, info, cache, cross, use_reentrant=False)
            else:
                x = block(x, info, cache, cross)
        return x

    def _info(
        self,
        x: Tensor,
        positions: Tensor,
        state: KeyValueState | None,
        lengths: Tensor | None,
        documents: Tensor | None,
    ) -> AttentionInfo:
        """Mask, rotation and bias of this pass, the same for all layers."""
        n, device = x.shape[1], x.device
        starts = 0 if state is None else state.starts
        n_keys = n if state is None else state.n_keys(n)
        padded = None if self.causal else lengths
        info = AttentionInfo(
            Mask(n, n_keys, causal=self.causal, starts=starts, lengths=padded, documents=documents, device=device)
        )
        if state is not None and lengths is not None:
            info.counts = lengths.tolist()
        if self.rotary is not None:
            info.rotation = self.rotary(positions, self._sequence_lengths(n, starts, lengths, documents, device))
        if self.bias is not None:
            bias = self.bias(position_ids(starts, n, device), torch.arange(n_keys, device=device))
            info.bias = bias.to(x.dtype)
        return info

    def _sequence_lengths(
        self,
        n: int,
        starts: int | list[int],
        lengths: Tensor | None,
        documents: Tensor | None,
        device: torch.device,
    ) -> int | Tensor:
        """The length of each token's sequence, (B or 1, T or 1), on which LongRoPE depends; n for all others."""
        if self.rotary is None or self.rotary.switch_length is None:
            return n
        if documents is not None:
            return (documents[:, :, None] == documents[:, None, :]).sum(dim=-1)
        new = n if lengths is None else lengths[:, None]
        return torch.as_tensor(starts, device=device).view(-1, 1) + new

    @staticmethod
    def _cross_info(
        x: Tensor, state: KeyValueState | None, memory: Tensor | None, lengths: Tensor | None
    ) -> AttentionInfo | None:
        if memory is not None:
            n_keys = memory.shape[1]
        elif state is not None and state.cross:
            n_keys = state.cross[0].keys.shape[2]
        else:
            return None
        if state is not None:
            lengths = state.memory_lengths
        mask = Mask(x.shape[1], n_keys, causal=False, lengths=lengths, device=x.device)
        return AttentionInfo(mask, memory=memory)


def position_ids(starts: int | list[int], n: int, device: torch.device) -> Tensor:
    """Positions of n tokens from `starts` on: (1, n), or (B, n) where rows differ."""
    if isinstance(starts, int):
        return torch.arange(starts, starts + n, device=device)[None]
    begin = torch.as_tensor(starts, device=device).view(-1, 1)
    return begin + torch.arange(n, device=device)
