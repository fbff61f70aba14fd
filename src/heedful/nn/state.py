"""What decoding remembers between steps, passed in and handed back, never kept on a module.

A `State` has one row per sequence. Rows are independent: `select` reorders or repeats them (beam search), `truncate`
forgets the newest tokens (speculative decoding), `free` empties a row so that another sequence can take its place
(continuous batching). A Transformer remembers keys and values (`KeyValueState`), in one block per layer, allocated
ahead and doubled when full; a recurrent network its hidden states (`RecurrentState`).

    B rows, G key/value heads, S remembered positions, D head size, L layers, C all of one layer's recurrent state
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class State(ABC):
    """The rows being decoded and how many tokens each has read; what is remembered of them is a subclass's own."""

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
        order = [int(r) for r in rows]
        if any(r < 0 or r >= self.n_rows for r in order):
            raise ValueError(f"rows {order} of a state with {self.n_rows} rows")
        self.lengths = [self.lengths[r] for r in order]
        self._select(order)

    @abstractmethod
    def _select(self, rows: list[int]) -> None:
        """Keep these rows of everything that is remembered."""

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


class Cache:
    """One layer's keys and values, (B, G, capacity, D); row b holds `lengths[b]` of them."""

    def __init__(self, state: KeyValueState) -> None:
        self.state = state
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, G, T, D) to each row; all that is remembered comes back."""
        starts, n = self.state.starts, k.shape[2]
        end = self.state.n_keys(n)
        self._reserve(end, k, v)
        assert self.keys is not None and self.values is not None
        if isinstance(starts, int):
            self.keys[:, :, starts:end] = k
            self.values[:, :, starts:end] = v
        else:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            places = torch.tensor(starts, device=k.device)[:, None] + torch.arange(n, device=k.device)
            self.keys[rows, :, places] = k.transpose(1, 2)  # advanced indices come first: (B, T, G, D)
            self.values[rows, :, places] = v.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _reserve(self, end: int, k: Tensor, v: Tensor) -> None:
        if self.keys is not None and self.keys.shape[2] >= end:
            return
        have = 0 if self.keys is None else self.keys.shape[2]
        capacity = max(end, 2 * have, self.state.capacity)
        keys = k.new_zeros(*k.shape[:2], capacity, k.shape[3])
        values = v.new_zeros(*v.shape[:2], capacity, v.shape[3])
        if self.keys is not None and self.values is not None:
            keys[:, :, :have], values[:, :, :have] = self.keys, self.values
        self.keys, self.values = keys, values

    def select(self, rows: list[int]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class CrossCache:
    """One layer's keys and values of an encoder's output: computed once, then only read."""

    def __init__(self) -> None:
        self.empty = True
        self.keys: Tensor
        self.values: Tensor

    def fill(self, k: Tensor, v: Tensor) -> None:
        self.keys, self.values, self.empty = k, v, False

    def select(self, rows: list[int]) -> None:
        if not self.empty:
            self.keys, self.values = self.keys[rows], self.values[rows]


class KeyValueState(State):
    """What every layer of a Transformer remembers of each row, and with `cross` of an encoder's output."""

    def __init__(self, n_layers: int, n_rows: int, *, cross: bool = False, capacity: int = 0) -> None:
        super().__init__(n_rows)
        self.capacity = capacity
        self.caches = [Cache(self) for _ in range(n_layers)]
        self.cross = [CrossCache() for _ in range(n_layers)] if cross else []
        self.memory_lengths: Tensor | None = None  # (B,) of the encoder's output, None if none is padded

    def n_keys(self, n_new: int) -> int:
        """How many key positions there are once every row has n_new more."""
        return max(self.lengths) + n_new

    def _select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)
        for fixed in self.cross:
            fixed.select(rows)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[rows]


@dataclass
class Memory:
    """What a recurrent encoder leaves to its decoder."""

    last: Tensor  # (B, L, C) the hidden state it ends in, with which the decoder begins
    values: Tensor  # (B, S, E) its outputs ("annotations")
    keys: Tensor  # (B, S, E) what a score compares with, computed once
    allowed: Tensor | None  # (B, 1, 1, S) True where the source is real, None if all of it is

    def select(self, rows: list[int]) -> Memory:
        allowed = None if self.allowed is None else self.allowed[rows]
        return Memory(self.last[rows], self.values[rows], self.keys[rows], allowed)


class RecurrentState(State):
    """The hidden state after each token, since a recurrent network cannot go back; and the memory of the source."""

    def __init__(self, memory: Memory, *, capacity: int = 0) -> None:
        super().__init__(memory.last.shape[0])
        self.memory = memory
        self.past = memory.last.new_zeros(self.n_rows, 1 + capacity, *memory.last.shape[1:])
        self.past[:, 0] = memory.last  # (B, 1 + capacity, L, C): after n tokens at n

    def now(self) -> Tensor:
        """Each row's hidden state after the tokens it has read.  (B, L, C)"""
        return self.past[torch.arange(self.n_rows, device=self.past.device), self.lengths]

    def extend(self, states: Tensor) -> None:
        """Note the hidden states (B, T, L, C) after each of T new tokens; `advance` says how many of them are real."""
        n = states.shape[1]
        end = max(self.lengths) + 1 + n
        if self.past.shape[1] < end:
            room = max(end, 2 * self.past.shape[1]) - self.past.shape[1]
            self.past = torch.cat([self.past, states.new_zeros(self.n_rows, room, *states.shape[2:])], dim=1)
        rows = torch.arange(self.n_rows, device=states.device)[:, None]
        lengths = torch.tensor(self.lengths, device=states.device)[:, None]
        self.past[rows, lengths + 1 + torch.arange(n, device=states.device)] = states

    def _select(self, rows: list[int]) -> None:
        self.past, self.memory = self.past[rows], self.memory.select(rows)
