"""Decoding state: the KV cache of a Transformer, passed to every decode step and never stored on a module.

A `State` has one row per sequence, and rows are independent. `select` reorders or repeats them (beam search),
`truncate` removes the newest tokens (speculative decoding), `free` empties a row for another sequence, `append_rows`
copies rows from another state and `remove_row` removes one; both cost that row alone (continuous batching).
`KeyValueState` caches keys and values in one tensor per layer, allocated ahead and doubled when full, as they are or in
8 bits (nn/int8_cache.py);
`RecurrentState` (nn/recurrent_state.py) holds the hidden states of an RNN.

    B rows, G key/value heads, S cached positions, D head size
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from heedful.nn.int8_cache import CacheType, empty_cache, restore_keys_values, store_keys_values

T = TypeVar("T")


class State(ABC):
    """The rows being decoded and how many tokens of each are cached; what is cached is up to the subclass."""

    # LongRoPE's switch length: a row that grows past it is recomputed; no step of several tokens may cross it.
    switch_length: int | None = None

    def __init__(self, n_rows: int) -> None:
        self.lengths = [0] * n_rows

    @property
    def n_rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def starts(self) -> int | list[int]:
        """Position of each row's next token; a single number if it is the same for all rows (the fast case)."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else self.lengths

    def advance(self, counts: int | Sequence[int]) -> None:
        """Add `counts[b]` tokens to the length of row b; whatever was written after them is padding."""
        if isinstance(counts, int):
            counts = [counts] * self.n_rows
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows in this order; a row may come several times."""
        order = self._checked(rows)
        self.lengths = [self.lengths[r] for r in order]
        self._select(order)

    def subset(self, rows: Sequence[int]) -> Self:
        """A new state with these rows; this one is unchanged."""
        copied = copy.copy(self)
        copied._unshare()
        copied.select(rows)
        return copied

    def _unshare(self) -> None:  # noqa: B027  # optional
        """After a shallow copy: copy whatever `select` changes in place."""

    def _checked(self, rows: Sequence[int] | Tensor) -> list[int]:
        order = [int(r) for r in rows]
        if any(r < 0 or r >= self.n_rows for r in order):
            raise ValueError(f"rows {order} of a state with {self.n_rows} rows")
        return order

    @abstractmethod
    def _select(self, rows: list[int]) -> None:
        """Select these rows of everything that is cached."""

    def append_rows(self, other: Self, rows: Sequence[int] | None = None) -> None:
        """Append rows of another state of the same model, all of them unless `rows` is given."""
        order = other._checked(range(other.n_rows) if rows is None else rows)
        self._append_rows(other, order)
        self.lengths = self.lengths + [other.lengths[r] for r in order]

    @abstractmethod
    def _append_rows(self, other: Self, rows: list[int]) -> None:
        """Copy what the other state caches for these rows; called before `lengths` is updated."""

    def remove_row(self, row: int) -> None:
        """Remove one row; the last row moves into its place, the others keep theirs."""
        self._checked([row])
        self._remove_row(row)
        self.lengths = swap_remove(self.lengths, row)

    @abstractmethod
    def _remove_row(self, row: int) -> None:
        """Move what is cached for the last row into this row's place; called before `lengths` is updated."""

    def truncate(self, n: int | Sequence[int]) -> None:
        """Keep only the first n tokens of each row (one number, or one per row)."""
        kept = [n] * self.n_rows if isinstance(n, int) else list(n)
        if len(kept) != self.n_rows or any(k < 0 for k in kept):
            raise ValueError(f"cannot truncate {self.n_rows} rows to {kept}")
        self.lengths = [min(a, b) for a, b in zip(self.lengths, kept, strict=True)]

    def free(self, row: int) -> None:
        """Empty one row: the next token given to it is the first of a new sequence."""
        if not 0 <= row < self.n_rows:
            raise ValueError(f"row {row} of a state with {self.n_rows} rows")
        self.lengths[row] = 0


def swap_remove(rows: list[T], row: int) -> list[T]:
    """A list with one entry per row after `State.remove_row`: the last entry replaces the removed one."""
    kept = rows[:-1]
    if row < len(kept):
        kept[row] = rows[-1]
    return kept


def next_capacity(capacity: int, needed: int) -> int:
    """The capacity, at least doubled if more is needed."""
    return capacity if capacity >= needed else max(needed, 2 * capacity)


def enlarge(x: Tensor, n_rows: int, n_positions: int, dim: int) -> Tensor:
    """x if it is large enough, else a zero-padded copy with this many rows, and positions along `dim`."""
    old_rows, old_positions = x.shape[0], x.shape[dim]
    if old_rows >= n_rows and old_positions >= n_positions:
        return x
    shape = list(x.shape)
    shape[0], shape[dim] = max(old_rows, n_rows), max(old_positions, n_positions)
    larger = x.new_zeros(shape)
    larger[:old_rows].narrow(dim, 0, old_positions).copy_(x)
    return larger


def index_rows(x: Tensor, rows: list[int]) -> Tensor:
    """x[rows] by `index_select`, which copies whole rows and is several times as fast as indexing."""
    return x.index_select(0, torch.tensor(rows, dtype=torch.long, device=x.device))


class Cache:
    """One layer's keys and values, each (rows, G, capacity, D); the first B rows are in use, and of row b the first
    `state.lengths[b]` positions. With `kind` "int8" they are stored as int8 (rows, G, capacity, D + 2)."""

    def __init__(self, state: KeyValueState, kind: CacheType | None = None) -> None:
        self.state, self.kind = state, kind
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, G, T, D) to each row; returns all cached ones (B, G, S, D).

        Of row b the first `counts[b]` tokens are real. Padding is written too; later tokens overwrite it.
        """
        starts, n_rows, n, dtype = self.state.starts, k.shape[0], k.shape[2], k.dtype
        end = self.state.n_keys(n)
        k, v = store_keys_values(k, v, self.kind)
        keys, values = self._reserve(n_rows, end, k, v)
        if isinstance(starts, int):
            keys[:n_rows, :, starts:end] = k
            values[:n_rows, :, starts:end] = v
        else:
            rows, positions = self.state.write_indices(n, k.device)
            keys[rows, :, positions] = k.transpose(1, 2)  # advanced indices come first: (B, T, G, D)
            values[rows, :, positions] = v.transpose(1, 2)
        return restore_keys_values(keys[:n_rows, :, :end], values[:n_rows, :, :end], self.kind, dtype)

    def reserve(self, n_rows: int, end: int, n_heads: int, size: int) -> tuple[Tensor, Tensor]:
        """Key and value tensors as they are stored, enlarged if needed, for a caller that writes to them."""
        like = empty_cache(n_heads, size, self.kind) if self.keys is None else self.keys
        return self._reserve(n_rows, end, like, like)

    def _reserve(self, n_rows: int, end: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate or enlarge the tensors for this many rows and positions of keys and values like k and v."""
        if self.keys is None or self.values is None:
            capacity = max(end, self.state.capacity)
            self.keys = k.new_zeros(n_rows, k.shape[1], capacity, k.shape[3])
            self.values = v.new_zeros(n_rows, v.shape[1], capacity, v.shape[3])
        elif self.keys.shape[0] < n_rows or self.keys.shape[2] < end:
            size = next_capacity(self.keys.shape[0], n_rows), next_capacity(self.keys.shape[2], end)
            self.keys, self.values = enlarge(self.keys, *size, 2), enlarge(self.values, *size, 2)
        return self.keys, self.values

    def copy(self, state: KeyValueState) -> Cache:
        """A cache of another state that shares the tensors until either is changed."""
        other = copy.copy(self)
        other.state = state
        return other

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = index_rows(self.keys, rows), index_rows(self.values, rows)

    def append_rows(self, other: Cache, rows: list[int], n: int) -> None:
        """Append the first n positions of these rows of another cache."""
        at, end = self.state.n_rows, self.state.n_rows + len(rows)
        if other.keys is not None and other.values is not None:
            keys, values = self._reserve(end, n, other.keys, other.values)
            keys[at:end, :, :n] = other.keys[rows, :, :n]
            values[at:end, :, :n] = other.values[rows, :, :n]
        elif self.keys is not None and self.values is not None:  # the new rows have no cached tokens
            self._reserve(end, 0, self.keys, self.values)

    def clear(self, row: int) -> None:
        """Zero one row: a NaN left behind would spread to its next sequence, although masked (0 · NaN is NaN)."""
        if self.keys is not None and self.values is not None:
            self.keys[row], self.values[row] = 0, 0

    def remove_row(self, row: int) -> None:
        """Copy the last row over this one."""
        last, n = self.state.n_rows - 1, self.state.lengths[-1]
        if row != last and self.keys is not None and self.values is not None:
            self.keys[row, :, :n] = self.keys[last, :, :n]
            self.values[row, :, :n] = self.values[last, :, :n]


class CrossCache:
    """One layer's cross-attention keys and values, computed once from the encoder's output.

    They are padded to one tensor (rows, G, S, D), or in 8 bits as in `Cache`; the state's `memory_lengths` holds the
    real lengths. `sources` identifies rows that `select` made from the same row: reordering those, as beam search does,
    copies nothing.
    """

    def __init__(self, kind: CacheType | None = None) -> None:
        self.kind, self.dtype = kind, torch.float32
        self.sources: list[object] = []  # one per row in use
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether the keys and values have not been computed yet."""
        return self._keys is None

    @property
    def n_rows(self) -> int:
        """Number of rows in use."""
        return len(self.sources)

    @property
    def keys(self) -> Tensor:
        """Keys (B, G, S, D), as they are stored."""
        assert self._keys is not None
        return self._keys[: self.n_rows]

    @property
    def values(self) -> Tensor:
        """Values (B, G, S, D), as they are stored."""
        assert self._values is not None
        return self._values[: self.n_rows]

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Store the keys and values (B, G, S, D) of an encoder's output."""
        self.dtype = k.dtype
        self._set(*store_keys_values(k, v, self.kind))

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, S, D)."""
        return restore_keys_values(self.keys, self.values, self.kind, self.dtype)

    def _set(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values, self.sources = keys, values, [object() for _ in range(len(keys))]

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        if self.empty:
            return
        sources = [self.sources[r] for r in rows]
        if sources != self.sources:
            self._set(index_rows(self.keys, rows), index_rows(self.values, rows))
            self.sources = sources

    def append_rows(self, other: CrossCache, rows: list[int]) -> None:
        """Append these rows of another cache."""
        if other.empty:
            return
        if self._keys is None or self._values is None:
            self.dtype = other.dtype
            return self._set(other.keys[rows], other.values[rows])
        at, end, n = self.n_rows, self.n_rows + len(rows), other.keys.shape[2]
        n_rows = next_capacity(self._keys.shape[0], end)
        self._keys, self._values = enlarge(self._keys, n_rows, n, 2), enlarge(self._values, n_rows, n, 2)
        self._keys[at:end, :, :n] = other.keys[rows]
        self._values[at:end, :, :n] = other.values[rows]
        self.sources = self.sources + [object() for _ in rows]

    def remove_row(self, row: int) -> None:
        """Copy the last row over this one."""
        if self._keys is not None and self._values is not None:
            last = self.n_rows - 1
            self._keys[row], self._values[row] = self._keys[last], self._values[last]
            self.sources = swap_remove(self.sources, row)


class KeyValueState(State):
    """The KV cache of every layer of a Transformer, and with `cross` the cross-attention caches too; `kind` is how keys
    and values are stored (None: as they are)."""

    def __init__(
        self,
        n_layers: int,
        n_rows: int,
        *,
        cross: bool = False,
        capacity: int = 0,
        kind: CacheType | None = None,
    ) -> None:
        super().__init__(n_rows)
        self.capacity = capacity
        self.caches = [Cache(self, kind) for _ in range(n_layers)]
        self.cross = [CrossCache(kind) for _ in range(n_layers)] if cross else []
        self.memory_lengths: Tensor | None = None  # (B,) of the encoder's output, None without padding
        self._write_indices: tuple[list[int], int, Tensor, Tensor] | None = None

    def n_keys(self, n_new: int) -> int:
        """Number of key positions once n_new tokens are appended to every row."""
        return max(self.lengths) + n_new

    def write_indices(self, n_new: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row (B, 1) and position (B, n_new) indices of the next tokens; built once per pass for all layers."""
        if self._write_indices is None or self._write_indices[0] != self.lengths or self._write_indices[1] != n_new:
            rows = torch.arange(self.n_rows, device=device)[:, None]
            positions = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n_new, device=device)
            self._write_indices = list(self.lengths), n_new, rows, positions
        return self._write_indices[2:]

    def _unshare(self) -> None:
        self.caches = [cache.copy(self) for cache in self.caches]
        self.cross = [copy.copy(cache) for cache in self.cross]

    def free(self, row: int) -> None:
        """Empty one row and zero its keys and values."""
        super().free(row)
        for cache in self.caches:
            cache.clear(row)

    def _select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)
        self._select_memory(rows)

    def _select_memory(self, rows: list[int]) -> None:
        """Select these rows of the cross-attention caches."""
        for cross in self.cross:
            cross.select(rows)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[rows]

    def _append_rows(self, other: Self, rows: list[int]) -> None:
        longest = max((other.lengths[r] for r in rows), default=0)
        for cache, theirs in zip(self.caches, other.caches, strict=True):
            cache.append_rows(theirs, rows, longest)
        self._append_memory(other, rows)

    def _append_memory(self, other: Self, rows: list[int]) -> None:
        """Append these rows of the other's cross-attention caches."""
        lengths = self._concatenated_memory_lengths(other, rows)
        try:
            for cross, their_cross in zip(self.cross, other.cross, strict=True):
                cross.append_rows(their_cross, rows)
        except BaseException:  # out of memory halfway: undo, so that the rows already here can continue
            for cross in self.cross:
                del cross.sources[self.n_rows :]
            raise
        self.memory_lengths = lengths

    def _concatenated_memory_lengths(self, other: Self, rows: list[int]) -> Tensor | None:
        if not other.cross or other.cross[0].empty:
            return self.memory_lengths
        theirs, n = other.memory_lengths, other.cross[0].keys.shape[2]
        if self.cross[0].empty:
            return None if theirs is None else theirs[rows]
        mine, size = self.memory_lengths, self.cross[0].keys.shape[2]
        if mine is None and theirs is None and n == size:
            return None
        like = other.cross[0].keys
        mine = like.new_full((self.n_rows,), size, dtype=torch.long) if mine is None else mine
        new = like.new_full((len(rows),), n, dtype=torch.long) if theirs is None else theirs[rows]
        return torch.cat([mine, new])

    def _remove_row(self, row: int) -> None:
        for cache in self.caches:
            cache.remove_row(row)
        self._remove_memory(row)

    def _remove_memory(self, row: int) -> None:
        """Move what the cross-attention caches have for the last row into this row's place."""
        for cross in self.cross:
            cross.remove_row(row)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[swap_remove(list(range(self.n_rows)), row)]
