"""The parts of the recurrent encoder-decoder (seq2seq), with and without attention.

`Recurrence` is PyTorch's LSTM (Hochreiter & Schmidhuber 1997) or GRU (Cho et al. 2014) on padded batches. `Align` is
attention in its first form: a score compares the decoder's hidden state with each output of the encoder. The decoders
differ in when they attend:

    Decoder           no attention: the source enters only by the initial hidden state (Sutskever et al. 2014)
    BahdanauDecoder   attends with the hidden state before the step; the context is an input of the step (2015)
    LuongDecoder      attends with the hidden state after the step, and combines it with the context (2015)

PyTorch's GRU applies the reset gate to U h + b, Cho et al. apply it to h; published weights follow PyTorch.

    B batch, T target, S source, E width, L layers, C size of a layer's state: E for a GRU (h), 2 E for an LSTM (h, c)
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

    If bidirectional, each direction has half the width; outputs and state concatenate both.
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
            dropout=dropout if n_layers > 1 else 0.0,  # applied between layers
        )

    def forward(self, x: Tensor, hidden: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, d_input) from the state `hidden` (B, L, C), zeros unless given -> outputs (B, T, E), final state.

        `lengths` (B,) are the rows' lengths where they are padded; outputs at padding are 0.
        """
        begin = None if hidden is None else self._split(hidden)
        if lengths is None:
            out, end = self.cells(x, begin)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, end = self.cells(packed, begin)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return out, self._merge(end)

    def forward_steps(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` one step at a time: outputs (B, T, E) and the state after every step (B, T, L, C)."""
        outs, states = [], []
        for step in x.split(1, dim=1):
            out, hidden = self(step, hidden)
            outs.append(out)
            states.append(hidden)
        return torch.cat(outs, dim=1), torch.stack(states, dim=1)

    def top_hidden(self, hidden: Tensor) -> Tensor:
        """The last layer's h, (B, 1, E), of a state (B, L, C)."""
        return hidden[:, -1:, : self.d_model]

    def _split(self, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        """State (B, L, C) -> h, or (h, c), each (L, B, E), as PyTorch has it."""
        parts = [p.transpose(0, 1).contiguous() for p in hidden.split(self.d_model, dim=-1)]
        return tuple(parts) if isinstance(self.cells, nn.LSTM) else parts[0]

    def _merge(self, end: Tensor | tuple[Tensor, ...]) -> Tensor:
        """h or (h, c), each (L x directions, B, E / directions) -> state (B, L, C)."""
        parts = end if isinstance(end, tuple) else (end,)
        n_directions = 2 if self.cells.bidirectional else 1
        rows = [p.unflatten(0, (-1, n_directions)).permute(2, 0, 1, 3).flatten(2) for p in parts]  # (B, L, E)
        return torch.cat(rows, dim=-1)


class Dot(nn.Module):
    """The score q·k, without parameters."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def keys(self, values: Tensor) -> Tensor:
        """Keys (B, S, E) of the encoder's outputs (B, S, E): the part of the score that is computed once per source."""
        return values

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Queries (B, T, E), keys (B, S, E) -> scores (B, T, S)."""
        return q @ k.transpose(1, 2)


class General(Dot):
    """The score q·(W k), called general or multiplicative."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.key = nn.Linear(d_model, d_model, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        """W k."""
        return self.key(values)


class Additive(General):
    """The score v·tanh(W q + U k). It equals v·tanh(W' [q; k]) with W' = [W U]: Luong's "concat" is Bahdanau's."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, 1, bias=False)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Queries (B, T, E), keys (B, S, E) -> scores (B, T, S)."""
        activated = torch.tanh(self.query(q)[:, :, None] + k[:, None])  # (B, T, S, E)
        return self.v(activated)[..., 0]


SCORES: dict[str, Callable[[int], Dot]] = {
    "additive": Additive,
    "dot": Dot,
    "general": General,
    "concat": Additive,
}


class Align(nn.Module):
    """Single-head attention over the encoder's outputs, with one of SCORES (an "alignment model")."""

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


class DecoderOutput(NamedTuple):
    """Hidden states, recurrent states and attention weights of a decoder pass."""

    hidden: Tensor  # (B, T, E)
    states: Tensor | None  # (B, T, L, C) after every token, with `keep_states`
    weights: Tensor | None  # (B, 1, T, S), None without attention


class Decoder(nn.Module):
    """A recurrent decoder without attention: the source enters only by the initial state."""

    def __init__(self, recurrence: Recurrence) -> None:
        super().__init__()
        self.recurrence = recurrence

    def forward(self, x: Tensor, hidden: Tensor, memory: Memory, *, keep_states: bool = False) -> DecoderOutput:
        """Embedded targets x (B, T, d_input) from the state `hidden` (B, L, C) -> hidden states (B, T, E).

        `keep_states` also returns the recurrent state after every token.
        """
        if keep_states:
            out, states = self.recurrence.forward_steps(x, hidden)
            return DecoderOutput(out, states, None)
        return DecoderOutput(self.recurrence(x, hidden)[0], None, None)


class LuongDecoder(Decoder):
    """h̃ = tanh(W [c; h]) with the new hidden state h and its context c (Luong et al. 2015, section 3.1)."""

    def __init__(self, recurrence: Recurrence, align: Align) -> None:
        super().__init__(recurrence)
        self.align = align
        self.combine = nn.Linear(2 * recurrence.d_model, recurrence.d_model, bias=False)

    def forward(self, x: Tensor, hidden: Tensor, memory: Memory, *, keep_states: bool = False) -> DecoderOutput:
        """Embedded targets x (B, T, d_input) from the state `hidden` (B, L, C) -> h̃ (B, T, E)."""
        h, states, _ = super().forward(x, hidden, memory, keep_states=keep_states)
        context, weights = self.align(h, memory)
        return DecoderOutput(torch.tanh(self.combine(torch.cat([context, h], dim=-1))), states, weights)


class BahdanauDecoder(Decoder):
    """s = f([y; c], s') with the context c of the previous hidden state s' (Bahdanau et al. 2015, section 3.1).

    The output combines s, y and c by a tanh layer; the paper has a maxout layer. The recurrence's input is the
    concatenation of y (d_input) and c (E).
    """

    def __init__(self, recurrence: Recurrence, align: Align, d_input: int) -> None:
        super().__init__(recurrence)
        self.align = align
        self.combine = nn.Linear(2 * recurrence.d_model + d_input, recurrence.d_model, bias=False)

    def forward(self, x: Tensor, hidden: Tensor, memory: Memory, *, keep_states: bool = False) -> DecoderOutput:
        """Embedded targets x (B, T, d_input) from the state `hidden` (B, L, C) -> hidden states (B, T, E)."""
        combined, attended, states = [], [], []
        for y in x.split(1, dim=1):
            context, weights = self.align(self.recurrence.top_hidden(hidden), memory)
            s, hidden = self.recurrence(torch.cat([y, context], dim=-1), hidden)
            combined.append(torch.cat([context, s, y], dim=-1))
            attended.append(weights)
            states.append(hidden)
        out = torch.tanh(self.combine(torch.cat(combined, dim=1)))
        return DecoderOutput(out, torch.stack(states, dim=1) if keep_states else None, torch.cat(attended, dim=2))
