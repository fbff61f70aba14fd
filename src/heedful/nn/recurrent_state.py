"""What decoding with a recurrent network remembers between steps: see nn/state.py for what a state promises.

B rows, S positions of the source, E model width, L layers, C all of one layer's recurrent state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.nn.state import State, doubled, grown, taken, without


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

    def join(self, other: Memory) -> Memory:
        """The rows of both; the shorter sources are padded."""
        n = max(self.values.shape[1], other.values.shape[1])
        both = self, other
        allowed = None
        if self.allowed is not None or other.allowed is not None or self.values.shape != other.values.shape:
            allowed = torch.cat([F.pad(m._allowed(), (0, n - m.values.shape[1])) for m in both])
        values = torch.cat([F.pad(m.values, (0, 0, 0, n - m.values.shape[1])) for m in both])
        keys = torch.cat([F.pad(m.keys, (0, 0, 0, n - m.keys.shape[1])) for m in both])
        return Memory(torch.cat([m.last for m in both]), values, keys, allowed)

    def _allowed(self) -> Tensor:
        if self.allowed is not None:
            return self.allowed
        n_rows, n, _ = self.values.shape
        return torch.ones(n_rows, 1, 1, n, dtype=torch.bool, device=self.values.device)


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
        self._reserve(self.n_rows, max(self.lengths) + 1 + n)
        rows = torch.arange(self.n_rows, device=states.device)[:, None]
        lengths = torch.tensor(self.lengths, device=states.device)[:, None]
        self.past[rows, lengths + 1 + torch.arange(n, device=states.device)] = states

    def _reserve(self, n_rows: int, end: int) -> None:
        self.past = grown(self.past, doubled(self.past.shape[0], n_rows), doubled(self.past.shape[1], end), 1)

    def _select(self, rows: list[int]) -> None:
        self.past, self.memory = taken(self.past, rows), self.memory.select(rows)

    def _join(self, other: Self, rows: list[int]) -> None:
        at, end = self.n_rows, self.n_rows + len(rows)
        n = 1 + max((other.lengths[r] for r in rows), default=0)
        self._reserve(end, n)
        self.past[at:end, :n] = other.past[rows, :n]
        self.memory = self.memory.join(other.memory.select(rows))

    def _drop(self, row: int) -> None:
        self.past[row] = self.past[self.n_rows - 1]
        self.memory = self.memory.select(without(list(range(self.n_rows)), row))
