"""The rows of a paged KV cache as a decode step in a CUDA graph sees them: block tables and lengths are tensors.

A graph replays the same operations on the same memory, so nothing of a row may be a number in Python. Everything else
is the `PagedState` of the engine, whose blocks it uses; any family's `step` runs on it unchanged.

    B rows, G key/value heads, S positions, D head size, N blocks of P positions, W blocks in a table
    L layers, M positions of the encoders' outputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.nn.paged import BlockPool
from heedful.nn.state import Cache, CrossCache, KeyValueState


class GraphCache(Cache):
    """One layer of the pool."""

    state: GraphState

    def __init__(self, state: GraphState, index: int) -> None:
        super().__init__(state)
        self.index = index

    def extend(self, k: Tensor, v: Tensor, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, G, 1, D) to the rows' blocks; returns a copy of all (B, G, S, D)."""
        state, out = self.state, []
        block, offset = state.slots()
        for pool, new in zip(self.pages(k, v), (k, v), strict=True):
            pool[block, :, offset] = new[:, :, 0]
            gathered = pool[state.tables].transpose(1, 2)  # (B, G, W, P, D)
            out.append(gathered.flatten(2, 3))  # (B, G, S, D)
        return out[0], out[1]

    def pages(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, each (N, G, P, D)."""
        return self.state.pool.layer(self.index, k, v)


class GraphMemory:
    """The cross-attention keys and values of an encoder-decoder's rows, where a graph reads them."""

    def __init__(self, like: KeyValueState, n_rows: int, n_positions: int) -> None:
        def zeros(like: Tensor) -> Tensor:
            return like.new_zeros(n_rows, like.shape[1], n_positions, like.shape[3])

        self.layers = [(zeros(cache.keys), zeros(cache.values)) for cache in like.cross]  # L pairs of (B, G, M, D)
        self.lengths = torch.ones(n_rows, dtype=torch.long, device=like.cross[0].keys.device)  # 1 in rows not in use
        self.n_positions = n_positions
        self.sources: list[object | None] = [None] * n_rows  # what each row was copied from

    def load(self, state: KeyValueState) -> None:
        """Copy the rows that are not here yet, and zero those that are no longer in use: theirs may be NaN."""
        first = state.cross[0]
        sources = [*first.sources, *[None] * (len(self.sources) - first.n_rows)]
        changed = [row for row, (new, old) in enumerate(zip(sources, self.sources, strict=True)) if new is not old]
        rows, n = [row for row in changed if row < first.n_rows], first.keys.shape[2]
        if not changed:
            return
        for layer, cache in zip(self.layers, state.cross, strict=True):
            for there, new in zip(layer, (cache.keys, cache.values), strict=True):
                there[changed] = 0
                there[rows, :, :n] = new[rows]
        self.lengths[changed] = 1  # without a position to attend to, a row would be NaN
        self.lengths[rows] = n if state.memory_lengths is None else state.memory_lengths[rows]
        self.sources = sources


class GraphState(KeyValueState):
    """One new token for each of B rows; rows that are not in use write to the block `unused`."""

    def __init__(
        self, pool: BlockPool, n_layers: int, tables: Tensor, lengths: Tensor, memory: GraphMemory | None = None
    ) -> None:
        super().__init__(0, len(tables))
        self.pool, self.tables, self.device_lengths = pool, tables, lengths
        self.caches = [GraphCache(self, i) for i in range(n_layers)]
        if memory is not None:
            self.cross, self.memory_lengths = [CrossCache() for _ in memory.layers], memory.lengths
            for cache, layer in zip(self.cross, memory.layers, strict=True):
                cache.fill(*layer)

    @property
    def starts(self) -> Any:
        """Position of each row's next token (B,)."""
        return self.device_lengths

    def n_keys(self, n_new: int) -> int:
        """Number of key positions: all that the tables have."""
        return self.tables.shape[1] * self.pool.block_size

    def slots(self) -> tuple[Tensor, Tensor]:
        """Block and position in it (B,) of each row's next token."""
        size = self.pool.block_size
        block = self.tables.gather(1, (self.device_lengths // size)[:, None])[:, 0]
        return block, self.device_lengths % size

    def advance(self, counts: Any) -> None:
        """Nothing: the lengths on the device change with the graph's last operation."""
