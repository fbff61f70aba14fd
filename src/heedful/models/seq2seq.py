"""The recurrent encoder-decoder (sequence to sequence), without attention and with its first forms.

    attention             the decoder                                                             paper
    none                  begins with the encoder's last state, all it has of the source          Sutskever et al. 2014
    additive              attends with its previous state; the context is an input of the step    Bahdanau et al. 2015
    dot, general, concat  steps, then attends with its new state; both together give the output   Luong et al. 2015

The scores go by other names too (NAMES): general is multiplicative, or Luong's. The cells are LSTMs (Sutskever, Luong)
or GRUs, which Cho et al. 2014 invented for this model.

Where we differ: each direction of a bidirectional encoder has half the width, so that its outputs and its last state
have the decoder's (Bahdanau et al. give each the full width, and begin with a tanh layer of the backward state);
without attention the source reaches the decoder by its first state alone (Cho et al. feed it to every step too);
Luong's input feeding and local attention are left out. Sutskever et al. reverse the source: that is up to the data.

    B batch, T target, S source, E model width, L layers, C state of one layer (h, or h and c), V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, GenerativeModel, Output, as_batch, last_of_each, row_lengths
from heedful.models.config import Config
from heedful.nn.embed import Embedding
from heedful.nn.head import LanguageHead
from heedful.nn.mask import Mask
from heedful.nn.recurrent import CELLS, SCORES, Align, BahdanauDecoder, Decoder, DecoderOutput, LuongDecoder, Recurrence
from heedful.nn.recurrent_state import Memory, RecurrentState

# What people call the scores of attention.
NAMES = {
    "bahdanau": "additive",
    "luong": "general",
    "multiplicative": "general",
    "dot-product": "dot",
    "dot_product": "dot",
}
CHOICES: Mapping[str, Sequence[str]] = {"cell": tuple(CELLS), "attention": ("none", *SCORES)}


@dataclass(frozen=True)
class Seq2SeqConfig(Config):
    """The recurrent encoder-decoder's settings."""

    cell: str = "lstm"  # or gru
    bidirectional: bool = False  # of the encoder
    attention: str = "none"  # or additive, dot, general, concat, or one of NAMES
    d_model: int = 1000
    d_embed: int | None = None  # d_model unless given
    n_layers: int = 1  # of the encoder and of the decoder
    vocab_size: int = 30000
    target_vocab_size: int | None = None  # vocab_size unless given
    start_id: int = 0  # the token that the target begins with
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention", NAMES.get(str(self.attention).lower(), self.attention))
        super().__post_init__()
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                others = f" (or {', '.join(NAMES)})" if name == "attention" else ""
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}{others}")
        if not 0 <= self.start_id < self.n_target:
            raise ValueError(f"start_id is {self.start_id}, and the target's vocabulary has {self.n_target} tokens")

    @property
    def n_target(self) -> int:
        """The size of the target's vocabulary."""
        return self.target_vocab_size or self.vocab_size


class Seq2Seq(GenerativeModel[RecurrentState]):
    """Source embedding and recurrent encoder, target embedding and recurrent decoder, the head."""

    family = "seq2seq"
    config_class = Seq2SeqConfig
    config: Seq2SeqConfig
    abilities = ("generate", "stream", "translate", "neighbours", "capture")

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        c = config
        d_embed = c.d_embed or c.d_model
        self.start_id = c.start_id
        self.source_embed = Embedding(c.vocab_size, d_embed)
        self.target_embed = Embedding(c.n_target, d_embed)
        self.encoder = Recurrence(
            c.cell, d_embed, c.d_model, c.n_layers, bidirectional=c.bidirectional, dropout=c.dropout
        )
        self.decoder = self._decoder(c, d_embed)
        self.dropout = nn.Dropout(c.dropout)  # on what enters and leaves the layers (Zaremba et al. 2014)
        self.head = LanguageHead(c.d_model, c.n_target, bias=True)

    @staticmethod
    def _decoder(c: Seq2SeqConfig, d_embed: int) -> Decoder:
        before = c.attention == "additive"
        d_input = d_embed + c.d_model if before else d_embed
        recurrence = Recurrence(c.cell, d_input, c.d_model, c.n_layers, dropout=c.dropout)
        if c.attention == "none":
            return Decoder(recurrence)
        align = Align(c.attention, c.d_model)
        return BahdanauDecoder(recurrence, align, d_embed) if before else LuongDecoder(recurrence, align)

    def encode(self, batch: Batch) -> Memory:
        """The encoder's outputs (B, S, E), what attention compares them by, and its last state (B, L, C)."""
        if batch.source is None:
            raise ValueError("an encoder-decoder reads a source, and the batch has none")
        if batch.source_lengths is not None:
            row_lengths(batch.source, batch.source_lengths)  # an empty row has no last state
        x = self.dropout(self.source_embed(batch.source))  # (B, S, d_embed)
        values, last = self.encoder(x, lengths=batch.source_lengths)  # (B, S, E), (B, L, C)
        keys = values
        if isinstance(self.decoder, BahdanauDecoder | LuongDecoder):
            keys = self.decoder.align.score.keys(values)  # (B, S, E)
        mask = Mask(1, values.shape[1], causal=False, lengths=batch.source_lengths)
        return Memory(last, values, keys, mask.dense())

    def decode(self, tokens: Tensor, hidden: Tensor, memory: Memory, *, keep_states: bool = False) -> DecoderOutput:
        """Target tokens (B, T) that follow the recurrent state `hidden` (B, L, C) -> hidden states (B, T, E), the
        alignment (B, 1, T, S) and, with `keep_states`, the states after each token (B, T, L, C)."""
        x = self.dropout(self.target_embed(tokens))  # (B, T, d_embed)
        out, states, weights = self.decoder(x, hidden, memory, keep_states=keep_states)
        return DecoderOutput(self.dropout(out), states, weights)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Source (B, S) and target (B, T) -> logits (B, T, V) of the token that follows each of the target; with
        attention, `extra["alignment"]` holds its weights (B, 1, T, S)."""
        batch = as_batch(batch)
        memory = self.encode(batch)
        hidden, _, weights = self.decode(batch.ids, memory.last, memory)  # (B, T, E), None, (B, 1, T, S)
        return Output(hidden, self.head(hidden), {} if weights is None else {"alignment": weights})

    def hidden(self, batch: Batch, state: RecurrentState | None = None) -> Tensor:
        """The decoder's hidden states (B, T, E), following the tokens in the state if there is one."""
        if state is None:
            memory = self.encode(batch)
            return self.decode(batch.ids, memory.last, memory).hidden
        hidden, states, _ = self.decode(batch.ids, state.current(), state.memory, keep_states=True)
        assert states is not None
        state.extend(states)
        return hidden

    def start(self, batch: Batch, *, capacity: int = 0) -> tuple[Tensor, RecurrentState]:
        """Encode the source and prefill the target so far (`tokens`, or the start token): logits (B, V)."""
        memory = self.encode(batch)
        tokens = batch.tokens
        if tokens is None:
            tokens = torch.full((len(memory.last), 1), self.start_id, device=memory.last.device)
        counts = row_lengths(tokens, batch.lengths)
        state = RecurrentState(memory, capacity=capacity)
        hidden = self.hidden(Batch(tokens), state)
        state.advance(counts)
        return self.head(last_of_each(hidden, counts)), state

    def init_weights(self) -> None:
        """PyTorch's defaults: uniform in ±1/√d_model, embeddings N(0, 1), the head's bias 0.

        The papers' (Sutskever et al.: ±0.08, Luong et al.: ±0.1, Bahdanau et al.: orthogonal, N(0, 0.01²)) are for a
        width of 1,000; these depend on the width.
        """
        bound = 1 / math.sqrt(self.config.d_model)
        for name, p in self.named_parameters():
            if name.endswith("embed.weight"):
                nn.init.normal_(p)
            elif name == "head.bias":
                nn.init.zeros_(p)
            else:
                nn.init.uniform_(p, -bound, bound)
