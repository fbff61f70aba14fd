"""The parts of the recurrent encoder-decoder for which attention was invented.

`Recurrence` is PyTorch's LSTM (Hochreiter & Schmidhuber 1997) or GRU (Cho et al. 2014), which reads rows of unequal
length as if each were alone. `Align` is attention in its first form: a score compares the decoder's state with each
output of the encoder. The decoders differ in when they look:

    Decoder      does not look: all it knows of the source is the state it begins with (Sutskever et al. 2014)
    LookBefore   looks with the state before the step; what it sees enters the step (Bahdanau et al. 2015)
    LookAfter    steps, looks with the new state, and joins both (Luong et al. 2015)

PyTorch's GRU applies the reset gate to U h + b where Cho et al. apply it to h; everyone's weights are PyTorch's.

    B batch, T target, S source, E width, L layers, C all of one layer's state: E for a GRU (h), 2 E for an LSTM (h, c)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from heedful.nn.attention import Watch, softmax_weights
from heedful.nn.recurrent_state import Memory

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class Recurrence(nn.Module):
    """Layers of LSTM or GRU whose whole state is one tensor (B, L, C).

    Bidirectional, each direction has half the width: outputs and state join both, and fit a decoder of the same width.
    """

    def __init__(
        self,
        cell: str,
        d_input: int,
        d_model: int,
        n_layers: int = 1,
        *,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"cell {cell!r} is not one of {', '.join(CELLS)}")
        if bidirectional and d_model % 2:
            raise ValueError(f"d_model {d_model} is odd: a bidirectional encoder gives each direction half of it")
        self.d_model = d_model
        self.cells = CELLS[cell](
            d_input,
            d_model // 2 if bidirectional else d_model,
            n_layers,
            batch_first=True,
            bidirectional=bidirectional,
            dropout=dropout if n_layers > 1 else 0.0,  # it lies between layers
        )

    def forward(self, x: Tensor, carried: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, d_input) after the state `carried`, zero unless given -> outputs (B, T, E), state at the end.

        Padding, after `lengths` (B,) of a row, changes nothing; the outputs there are 0.
        """
        begin = None if carried is None else self._split(carried)
        if lengths is None:
            out, end = self.cells(x, begin)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, end = self.cells(packed, begin)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return out, self._join(end)

    def each(self, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """The same one step at a time, with the state after every step: (B, T, E), (B, T, L, C)."""
        outs, states = [], []
        for step in x.split(1, dim=1):
            out, carried = self(step, carried)
            outs.append(out)
            states.append(carried)
        return torch.cat(outs, dim=1), torch.stack(states, dim=1)

    def top(self, carried: Tensor) -> Tensor:
        """The last layer's h out of a state (B, L, C).  (B, 1, E)"""
        return carried[:, -1:, : self.d_model]

    def _split(self, carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        """PyTorch's form: h, or (h, c), each (L, B, E)."""
        parts = [p.transpose(0, 1).contiguous() for p in carried.split(self.d_model, dim=-1)]
        return tuple(parts) if isinstance(self.cells, nn.LSTM) else parts[0]

    def _join(self, end: Tensor | tuple[Tensor, ...]) -> Tensor:
        """One tensor from h or (h, c), each (L x directions, B, E / directions)."""
        parts = end if isinstance(end, tuple) else (end,)
        n_directions = 2 if self.cells.bidirectional else 1
        rows = [p.unflatten(0, (-1, n_directions)).permute(2, 0, 1, 3).flatten(2) for p in parts]  # (B, L, E)
        return torch.cat(rows, dim=-1)


class Dot(nn.Module):
    """q·k, without parameters."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def keys(self, values: Tensor) -> Tensor:
        """What queries are compared with; the part of the score that does not depend on them, computed once."""
        return values

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Queries (B, T, E), keys (B, S, E) -> scores (B, T, S)."""
        return q @ k.transpose(1, 2)


class General(Dot):
    """q·(W k), "multiplicative"."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.key = nn.Linear(d_model, d_model, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        return self.key(values)


class Additive(General):
    """v·tanh(W q + U k), which is v·tanh(W' [q; k]) with W' = [W U]: Luong's "concat" is Bahdanau's score."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, 1, bias=False)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        together = torch.tanh(self.query(q)[:, :, None] + k[:, None])  # (B, T, S, E)
        return self.v(together)[..., 0]


SCORES: dict[str, Callable[[int], Dot]] = {
    "additive": Additive,
    "dot": Dot,
    "general": General,
    "concat": Additive,
}


class Align(nn.Module):
    """Attention with one head and a score of choice: where in the source to look for the next target."""

    def __init__(self, score: str, d_model: int) -> None:
        super().__init__()
        if score not in SCORES:
            raise ValueError(f"the score {score!r} is not one of {', '.join(SCORES)}")
        self.score = SCORES[score](d_model)
        self.watch = Watch()

    def forward(self, q: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Queries (B, T, E) -> contexts (B, T, E) and weights (B, 1, T, S), exactly 0 on padding."""
        k, v, watch = memory.keys, memory.values, self.watch
        if watch.on:
            q, k, v = (
                watch.queries(q[:, None])[:, 0],
                watch.keys(k[:, None])[:, 0],
                watch.values(v[:, None])[:, 0],
            )
        weights = softmax_weights(self.score(q, k)[:, None], memory.allowed, watch)
        context = weights @ v[:, None]  # (B, 1, T, E)
        return (watch.heads(context) if watch.on else context)[:, 0], weights


class Decoded(NamedTuple):
    hidden: Tensor  # (B, T, E)
    states: Tensor | None  # (B, T, L, C) after every token, where they are wanted
    weights: Tensor | None  # (B, 1, T, S), of a decoder that looks


class Decoder(nn.Module):
    """Reads the target so far; knows of the source by the state it begins with."""

    def __init__(self, recurrence: Recurrence) -> None:
        super().__init__()
        self.recurrence = recurrence

    def forward(self, x: Tensor, carried: Tensor, memory: Memory, *, keep: bool = False) -> Decoded:
        """Embedded targets x (B, T, d_input) after the state `carried` (B, L, C); `keep` asks for every state."""
        if keep:
            out, states = self.recurrence.each(x, carried)
            return Decoded(out, states, None)
        return Decoded(self.recurrence(x, carried)[0], None, None)


class LookAfter(Decoder):
    """h̃ = tanh(W [c; h]) where h is the new state and c what it looks at (Luong et al. 2015, section 3.1)."""

    def __init__(self, recurrence: Recurrence, align: Align) -> None:
        super().__init__(recurrence)
        self.align = align
        self.combine = nn.Linear(2 * recurrence.d_model, recurrence.d_model, bias=False)

    def forward(self, x: Tensor, carried: Tensor, memory: Memory, *, keep: bool = False) -> Decoded:
        h, states, _ = super().forward(x, carried, memory, keep=keep)
        context, weights = self.align(h, memory)
        return Decoded(torch.tanh(self.combine(torch.cat([context, h], dim=-1))), states, weights)


class LookBefore(Decoder):
    """s = f([y; c], s') where c is what the state s' before it looks at (Bahdanau et al. 2015, section 3.1).

    The next word depends on s, y and c, through one tanh layer where the paper has a maxout layer.
    The recurrence's input is y (d_input) and c (E) side by side.
    """

    def __init__(self, recurrence: Recurrence, align: Align, d_input: int) -> None:
        super().__init__(recurrence)
        self.align = align
        self.combine = nn.Linear(2 * recurrence.d_model + d_input, recurrence.d_model, bias=False)

    def forward(self, x: Tensor, carried: Tensor, memory: Memory, *, keep: bool = False) -> Decoded:
        known, seen, states = [], [], []
        for y in x.split(1, dim=1):
            context, weights = self.align(self.recurrence.top(carried), memory)
            s, carried = self.recurrence(torch.cat([y, context], dim=-1), carried)
            known.append(torch.cat([context, s, y], dim=-1))
            seen.append(weights)
            states.append(carried)
        hidden = torch.tanh(self.combine(torch.cat(known, dim=1)))
        return Decoded(hidden, torch.stack(states, dim=1) if keep else None, torch.cat(seen, dim=2))
