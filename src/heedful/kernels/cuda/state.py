"""The rows of a paged KV cache as a decode step in a CUDA graph sees them: block tables and lengths are tensors.

A graph replays the same operations on the same memory, so nothing of a row may be a number in Python. Everything else
is the `PagedState` of the engine, whose blocks it uses; any family's `step` runs on it unchanged.

    B rows, G key/value heads, S positions, D head size, N blocks of P positions, W blocks in a table
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heedful.nn.paged import BlockPool
from heedful.nn.state import Cache, KeyValueState


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


class GraphState(KeyValueState):
    """One new token for each of B rows; rows that are not in use write to the block `unused`."""

    def __init__(self, pool: BlockPool, n_layers: int, tables: Tensor, lengths: Tensor) -> None:
        super().__init__(0, len(tables))
        self.pool, self.tables, self.device_lengths = pool, tables, lengths
        self.caches = [GraphCache(self, i) for i in range(n_layers)]

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
