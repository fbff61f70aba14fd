"""What decoding remembers between steps, passed in and handed back, never kept on a module.

A `State` has one row per sequence. Rows are independent: `select` reorders or repeats them (beam search), `truncate`
forgets the newest tokens (speculative decoding), `free` empties a row so that another sequence can take its place,
`join` takes in rows of another state and `drop` lets one go, each at the cost of that row alone (continuous batching).
A Transformer remembers keys and values (`KeyValueState`), in one block per layer, allocated ahead and doubled when
full; a recurrent network its hidden states (nn/recurrent_state.py).

    B rows, G key/value heads, S remembered positions, D head size
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class State(ABC):
    """The rows being decoded and how many tokens each has read; what is remembered of them is a subclass's own."""

    # LongRoPE's switch length: a row that grows past it is computed anew; a step of several tokens must not cross it.
    switch_length: int | None = None

    def __init__(self, n_rows: int) -> None:
        self.lengths = [0] * n_rows

    @property
    def n_rows(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> int | list[int]:
        """Where each row's next token goes: one number if all rows agree (the fast case)."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else self.lengths

    def advance(self, counts: int | Sequence[int]) -> None:
        """Note that row b has `counts[b]` more tokens; what was written past that is padding."""
        if isinstance(counts, int):
            counts = [counts] * self.n_rows
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows in this order; a row may come several times."""
        order = self._checked(rows)
        self.lengths = [self.lengths[r] for r in order]
        self._select(order)

    def part(self, rows: Sequence[int]) -> Self:
        """These rows in a state of their own; those here stay as they are."""
        part = copy.copy(self)
        part._part()
        part.select(rows)
        return part

    def _part(self) -> None:  # noqa: B027  # most have nothing to do
        """This is a copy: let nothing that `select` changes be another's too."""

    def _checked(self, rows: Sequence[int] | Tensor) -> list[int]:
        order = [int(r) for r in rows]
        if any(r < 0 or r >= self.n_rows for r in order):
            raise ValueError(f"rows {order} of a state with {self.n_rows} rows")
        return order

    @abstractmethod
    def _select(self, rows: list[int]) -> None:
        """Keep these rows of everything that is remembered."""

    def join(self, other: Self, rows: Sequence[int] | None = None) -> None:
        """Take in rows of another state of the same model, all unless told which: they come after those here."""
        order = other._checked(range(other.n_rows) if rows is None else rows)
        self._join(other, order)
        self.lengths = self.lengths + [other.lengths[r] for r in order]

    @abstractmethod
    def _join(self, other: Self, rows: list[int]) -> None:
        """Copy what the other state remembers of these rows; `lengths` is still as before."""

    def drop(self, row: int) -> None:
        """Let one row go; the last row takes its place, the others stay where they are."""
        self._checked([row])
        self._drop(row)
        self.lengths = without(self.lengths, row)

    @abstractmethod
    def _drop(self, row: int) -> None:
        """Put what is remembered of the last row in this row's place; `lengths` is still as before."""

    def truncate(self, n: int | Sequence[int]) -> None:
        """Forget all but the first n tokens of each row (one number, or one per row)."""
        kept = [n] * self.n_rows if isinstance(n, int) else list(n)
        if len(kept) != self.n_rows or any(k < 0 for k in kept):
            raise ValueError(f"cannot truncate {self.n_rows} rows to {kept}")
        self.lengths = [min(a, b) for a, b in zip(self.lengths, kept, strict=True)]

    def free(self, row: int) -> None:
        """Empty one row: the next token given to it is the first of a new sequence."""
        if not 0 <= row < self.n_rows:
            raise ValueError(f"row {row} of a state with {self.n_rows} rows")
        self.lengths[row] = 0


def without(rows: list[T], row: int) -> list[T]:
    """What `State.drop` does, to a list with one entry per row."""
    kept = rows[:-1]
    if row < len(kept):
        kept[row] = rows[-1]
    return kept


def doubled(have: int, need: int) -> int:
    return have if have >= need else max(need, 2 * have)


def grown(x: Tensor, n_rows: int, n_places: int, dim: int) -> Tensor:
    """x, or its copy in a larger block of this many rows and places (along `dim`), the new ones 0."""
    have_rows, have_places = x.shape[0], x.shape[dim]
    if have_rows >= n_rows and have_places >= n_places:
        return x
    shape = list(x.shape)
    shape[0], shape[dim] = max(have_rows, n_rows), max(have_places, n_places)
    larger = x.new_zeros(shape)
    larger[:have_rows].narrow(dim, 0, have_places).copy_(x)
    return larger


def taken(x: Tensor, rows: list[int]) -> Tensor:
    """x[rows], several times as fast: whole rows are copied, not numbers."""
    return x.index_select(0, torch.tensor(rows, dtype=torch.long, device=x.device))


class Cache:
    """One layer's keys and values, (rows, G, capacity, D), of which the first B rows are in use; row b holds
    `lengths[b]` of them."""

    def __init__(self, state: KeyValueState) -> None:
        self.state = state
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, G, T, D) to each row, the first `counts` of each being real; returns all that
        are cached (B, G, S, D). Padding is written too, and overwritten by what follows."""
        starts, n_rows, n = self.state.starts, k.shape[0], k.shape[2]
        end = self.state.n_keys(n)
        keys, values = self._reserve(n_rows, end, k, v)
        if isinstance(starts, int):
            keys[:n_rows, :, starts:end] = k
            values[:n_rows, :, starts:end] = v
        else:
            rows, places = self.state.where(n, k.device)
            keys[rows, :, places] = k.transpose(1, 2)  # advanced indices come first: (B, T, G, D)
            values[rows, :, places] = v.transpose(1, 2)
        return keys[:n_rows, :, :end], values[:n_rows, :, :end]

    def reserve(self, n_rows: int, end: int, n_heads: int, size: int) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, G, capacity, D) with capacity for this many rows and positions, to be written to."""
        like = torch.empty(0, n_heads, 0, size) if self.keys is None else self.keys
        return self._reserve(n_rows, end, like, like)

    def _reserve(self, n_rows: int, end: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for this many rows and positions of keys and values like k and v."""
        if self.keys is None or self.values is None:
            capacity = max(end, self.state.capacity)
            self.keys = k.new_zeros(n_rows, k.shape[1], capacity, k.shape[3])
            self.values = v.new_zeros(n_rows, v.shape[1], capacity, v.shape[3])
        else:
            size = doubled(self.keys.shape[0], n_rows), doubled(self.keys.shape[2], end)
            self.keys, self.values = grown(self.keys, *size, 2), grown(self.values, *size, 2)
        return self.keys, self.values

    def copy(self, state: KeyValueState) -> Cache:
        """The same for another state, until one of them is changed."""
        other = copy.copy(self)
        other.state = state
        return other

    def select(self, rows: list[int]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = taken(self.keys, rows), taken(self.values, rows)

    def join(self, other: Cache, rows: list[int], n: int) -> None:
        """Take in the first n positions of these rows."""
        at, end = self.state.n_rows, self.state.n_rows + len(rows)
        if other.keys is not None and other.values is not None:
            keys, values = self._reserve(end, n, other.keys, other.values)
            keys[at:end, :, :n] = other.keys[rows, :, :n]
            values[at:end, :, :n] = other.values[rows, :, :n]
        elif self.keys is not None and self.values is not None:  # rows that have read nothing
            self._reserve(end, 0, self.keys, self.values)

    def clear(self, row: int) -> None:
        """Masked or not, what is no number would spoil the sums of whoever comes next."""
        if self.keys is not None and self.values is not None:
            self.keys[row], self.values[row] = 0, 0

    def drop(self, row: int) -> None:
        last, n = self.state.n_rows - 1, self.state.lengths[-1]
        if row != last and self.keys is not None and self.values is not None:
            self.keys[row, :, :n] = self.keys[last, :, :n]
            self.values[row, :, :n] = self.values[last, :, :n]


class CrossCache:
    """One layer's keys and values of an encoder's output: computed once, then only read.

    Rows of different length lie in one block (rows, G, S, D); the state's `memory_lengths` says how much is real.
    Rows that `select` made of one have the same source: to exchange them, as beam search does, copies nothing.
    """

    def __init__(self) -> None:
        self.sources: list[object] = []  # one for each row in use
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def empty(self) -> bool:
        return self._keys is None

    @property
    def n_rows(self) -> int:
        return len(self.sources)

    @property
    def keys(self) -> Tensor:
        assert self._keys is not None
        return self._keys[: self.n_rows]

    @property
    def values(self) -> Tensor:
        assert self._values is not None
        return self._values[: self.n_rows]

    def fill(self, k: Tensor, v: Tensor) -> None:
        self._keys, self._values, self.sources = k, v, [object() for _ in range(k.shape[0])]

    def select(self, rows: list[int]) -> None:
        if self.empty:
            return
        sources = [self.sources[r] for r in rows]
        if sources != self.sources:
            self.fill(taken(self.keys, rows), taken(self.values, rows))
            self.sources = sources

    def join(self, other: CrossCache, rows: list[int]) -> None:
        if other.empty:
            return
        if self._keys is None or self._values is None:
            return self.fill(other.keys[rows], other.values[rows])
        at, end, n = self.n_rows, self.n_rows + len(rows), other.keys.shape[2]
        n_rows = doubled(self._keys.shape[0], end)
        self._keys, self._values = grown(self._keys, n_rows, n, 2), grown(self._values, n_rows, n, 2)
        self._keys[at:end, :, :n] = other.keys[rows]
        self._values[at:end, :, :n] = other.values[rows]
        self.sources = self.sources + [object() for _ in rows]

    def drop(self, row: int) -> None:
        if self._keys is not None and self._values is not None:
            last = self.n_rows - 1
            self._keys[row], self._values[row] = self._keys[last], self._values[last]
            self.sources = without(self.sources, row)


class KeyValueState(State):
    """What every layer of a Transformer remembers of each row, and with `cross` of an encoder's output."""

    def __init__(self, n_layers: int, n_rows: int, *, cross: bool = False, capacity: int = 0) -> None:
        super().__init__(n_rows)
        self.capacity = capacity
        self.caches = [Cache(self) for _ in range(n_layers)]
        self.cross = [CrossCache() for _ in range(n_layers)] if cross else []
        self.memory_lengths: Tensor | None = None  # (B,) of the encoder's output, None if none is padded
        self._where: tuple[list[int], int, Tensor, Tensor] | None = None

    def n_keys(self, n_new: int) -> int:
        """How many key positions there are once every row has n_new more."""
        return max(self.lengths) + n_new

    def where(self, n_new: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows (B, 1) and places (B, n_new) of the next tokens: the same for all layers, so made once per pass."""
        if self._where is None or self._where[0] != self.lengths or self._where[1] != n_new:
            rows = torch.arange(self.n_rows, device=device)[:, None]
            places = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n_new, device=device)
            self._where = list(self.lengths), n_new, rows, places
        return self._where[2:]

    def _part(self) -> None:
        self.caches = [cache.copy(self) for cache in self.caches]
        self.cross = [copy.copy(fixed) for fixed in self.cross]

    def free(self, row: int) -> None:
        super().free(row)
        for cache in self.caches:
            cache.clear(row)

    def _select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)
        for fixed in self.cross:
            fixed.select(rows)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[rows]

    def _join(self, other: Self, rows: list[int]) -> None:
        longest = max((other.lengths[r] for r in rows), default=0)
        for cache, theirs in zip(self.caches, other.caches, strict=True):
            cache.join(theirs, rows, longest)
        lengths = self._joined_memory_lengths(other, rows)
        try:
            for fixed, fixed_theirs in zip(self.cross, other.cross, strict=True):
                fixed.join(fixed_theirs, rows)
        except BaseException:  # out of memory on the way: the rows that were here go on
            for fixed in self.cross:
                del fixed.sources[self.n_rows :]
            raise
        self.memory_lengths = lengths

    def _joined_memory_lengths(self, other: Self, rows: list[int]) -> Tensor | None:
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

    def _drop(self, row: int) -> None:
        for cache in self.caches:
            cache.drop(row)
        for fixed in self.cross:
            fixed.drop(row)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[without(list(range(self.n_rows)), row)]
