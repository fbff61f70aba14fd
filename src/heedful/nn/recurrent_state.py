"""Decoding state of a recurrent encoder-decoder; nn/state.py describes the interface.

B rows, S positions of the source, E model width, L layers, C all of one layer's recurrent state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.nn.state import State, enlarge, index_rows, next_capacity, swap_remove


@dataclass
class Memory:
    """The output of a recurrent encoder that the decoder uses."""

    last: Tensor  # (B, L, C) the final hidden state, which initializes the decoder
    values: Tensor  # (B, S, E) the encoder's outputs ("annotations")
    keys: Tensor  # (B, S, E) keys of the attention score, computed once
    allowed: Tensor | None  # (B, 1, 1, S) padding mask, True at real tokens; None without padding

    def select(self, rows: list[int]) -> Memory:
        """These rows, in this order."""
        allowed = None if self.allowed is None else self.allowed[rows]
        return Memory(self.last[rows], self.values[rows], self.keys[rows], allowed)

    def concatenate(self, other: Memory) -> Memory:
        """The rows of both; shorter sources are padded."""
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
    """The encoder's output, and the hidden state after every token: `truncate` must be able to go back to each."""

    def __init__(self, memory: Memory, *, capacity: int = 0) -> None:
        super().__init__(memory.last.shape[0])
        self.memory = memory
        self.history = memory.last.new_zeros(self.n_rows, 1 + capacity, *memory.last.shape[1:])
        self.history[:, 0] = memory.last  # (B, 1 + capacity, L, C): index n is the state after n tokens

    def current(self) -> Tensor:
        """Each row's hidden state after its last token, (B, L, C)."""
        return self.history[torch.arange(self.n_rows, device=self.history.device), self.lengths]

    def extend(self, states: Tensor) -> None:
        """Store the hidden states (B, T, L, C) after each of T new tokens; `advance` then counts the real ones."""
        n = states.shape[1]
        self._reserve(self.n_rows, max(self.lengths) + 1 + n)
        rows = torch.arange(self.n_rows, device=states.device)[:, None]
        lengths = torch.tensor(self.lengths, device=states.device)[:, None]
        self.history[rows, lengths + 1 + torch.arange(n, device=states.device)] = states

    def _reserve(self, n_rows: int, end: int) -> None:
        n_rows = next_capacity(self.history.shape[0], n_rows)
        self.history = enlarge(self.history, n_rows, next_capacity(self.history.shape[1], end), 1)

    def _select(self, rows: list[int]) -> None:
        self.history, self.memory = index_rows(self.history, rows), self.memory.select(rows)

    def _append_rows(self, other: Self, rows: list[int]) -> None:
        at, end = self.n_rows, self.n_rows + len(rows)
        n = 1 + max((other.lengths[r] for r in rows), default=0)
        self._reserve(end, n)
        self.history[at:end, :n] = other.history[rows, :n]
        self.memory = self.memory.concatenate(other.memory.select(rows))

    def _remove_row(self, row: int) -> None:
        self.history[row] = self.history[self.n_rows - 1]
        self.memory = self.memory.select(swap_remove(list(range(self.n_rows)), row))
