"""The contract every family keeps.

    forward(batch) -> Output             training and scoring
    start(batch)   -> logits, State      read a prompt, or encode a source once
    step(tokens, state) -> logits        the next token, or several

A batch is padded on the right; `lengths` says how much of each row is real. The state goes in and comes back:
nothing about a sequence is ever kept on a module.

    B batch, T positions, S source positions, E model width, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from heedful.models.config import Config
from heedful.models.mapping import WeightMap, identity
from heedful.nn.embed import Embedding
from heedful.nn.lora import NF4
from heedful.nn.mask import positions_in_documents
from heedful.nn.norm import RMSNorm
from heedful.nn.stack import Stack, places
from heedful.nn.state import KeyValueState, State


@dataclass
class Batch:
    """What a model reads. Ids are int64; padding lies on the right, its value does not matter."""

    tokens: Tensor | None = None  # (B, T) what a decoder continues or an encoder-only model reads
    lengths: Tensor | None = None  # (B,) real tokens per row, None if no row is padded
    source: Tensor | None = None  # (B, S) what an encoder-decoder reads
    source_lengths: Tensor | None = None  # (B,)
    segments: Tensor | None = None  # (B, T) BERT's sentence A or B
    documents: Tensor | None = None  # (B, T) number of the packed document each token belongs to
    images: Tensor | None = None  # (B, channels, height, width)
    targets: Tensor | None = None  # what an objective compares with: (B, T) ids, (B,) labels, (B, 2) first and last
    next_sentence: Tensor | None = None  # (B,) BERT: 0 if B follows A, 1 if it does not

    @property
    def ids(self) -> Tensor:
        if self.tokens is None:
            raise ValueError("this model reads tokens, and the batch has none")
        return self.tokens


@dataclass
class Output:
    """What a model says: its last hidden states, the logits of its head, and what else the head has to say."""

    hidden: Tensor  # (B, T, E)
    logits: Tensor | None = None  # (B, T, V), or (B, C) of a classifier
    extra: dict[str, Tensor] = field(default_factory=dict)


class Model(nn.Module):
    """Base of all families."""

    family: ClassVar[str]
    config_class: ClassVar[type[Config]]
    config: Any
    # What a loaded model offers its user (see heedful.loaded); families and heads add to it.
    abilities: tuple[str, ...] = ("capture",)
    # How weights.pack changed the weights, if it did, and how many there were.
    packed: str | None = None
    n_packed: int = 0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # What a model's files say that is no setting of the model, kept so that saving writes it again: its special
        # tokens by the hub's keys ("eos_token_id": an id or several), and how its authors generate with it.
        self.special: dict[str, Any] = {}
        self.generation: dict[str, Any] = {}

    @classmethod
    def create(cls, config: Config, *, device: str | torch.device = "cpu") -> Self:
        """A new model with its paper's initial weights; on the device "meta" it has shapes and no memory."""
        with torch.device("meta"):
            model = cls(config)
        if torch.device(device).type != "meta":
            model.to_empty(device=device)
            model.tie()
            model.init_weights()
        return model

    def init_weights(self) -> None:
        """N(0, 0.02), biases 0, norms 1: what most papers say or their code does; a family with others overrides."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | RMSNorm):
                module.reset_parameters()
                continue
            for p in module.parameters(recurse=False):
                if p.ndim >= 2:
                    nn.init.normal_(p, std=0.02)
                else:
                    nn.init.zeros_(p)

    def tie(self) -> None:
        """Make tied parameters one again, after their memory was replaced."""

    def weight_map(self) -> WeightMap:
        """The map to the hub's names; families without a hub layout keep their own."""
        return identity(dict(self.named_parameters()))

    def n_parameters(self) -> int:
        quantized = sum(m.n_weights for m in self.modules() if isinstance(m, NF4))
        return self.n_packed or sum(p.numel() for p in self.parameters()) + quantized

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def longest(self) -> int | None:
        """The longest sequence the model can read, None if its positions have no end."""
        return None

    def check_length(self, n: int) -> None:
        if self.longest is not None and n > self.longest:
            raise ValueError(f"{n} tokens do not fit: this model has positions for {self.longest}; shorten the text")


def as_batch(batch: Batch | Tensor) -> Batch:
    return Batch(tokens=batch) if isinstance(batch, Tensor) else batch


def row_lengths(tokens: Tensor, lengths: Tensor | None) -> list[int]:
    """Real tokens per row as numbers; every row must have one at least."""
    n = tokens.shape[1]
    counts = [n] * tokens.shape[0] if lengths is None else lengths.tolist()
    if any(c < 1 or c > n for c in counts):
        raise ValueError(f"every row needs 1 to {n} tokens, not {counts}")
    return counts


def last_of_each(x: Tensor, counts: list[int]) -> Tensor:
    """The hidden state of each row's last real position: (B, T, E) -> (B, E)."""
    rows = torch.arange(x.shape[0], device=x.device)
    return x[rows, torch.tensor(counts, device=x.device) - 1]


S = TypeVar("S", bound=State)


class GenerativeModel(Model, Generic[S]):
    """Families that speak: `start` reads what there is, `step` goes on from it. S is their kind of state."""

    head: nn.Module

    def start(self, batch: Batch, *, capacity: int = 0) -> tuple[Tensor, S]:
        """Read the prompt or the source: logits (B, V) of what comes next. `capacity` allocates ahead."""
        raise NotImplementedError

    def step(self, tokens: Tensor, state: S, *, last: bool = False) -> Tensor:
        """One more token per row (B,) -> logits (B, V); or several (B, T) -> (B, T, V), (B, V) of the `last` alone."""
        several = tokens if tokens.ndim == 2 else tokens[:, None]
        hidden = self._run(several, state)
        state.advance(several.shape[1])
        return self.head(hidden[:, -1] if last or tokens.ndim == 1 else hidden)

    def _run(self, tokens: Tensor, state: S) -> Tensor:
        """The hidden states (B, T, E) of tokens (B, T) that follow what the state remembers."""
        raise NotImplementedError


class DecoderModel(GenerativeModel[KeyValueState]):
    """Decoder-only families: embed, decode, and score the vocabulary."""

    abilities: tuple[str, ...] = ("generate", "stream", "fill", "embed", "capture")

    embed: Embedding
    decoder: Stack

    def embed_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings of tokens (B, T) at positions (B or 1, T); families with added positions add them here."""
        return self.embed(tokens)

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E), before the head."""
        return self._run(batch.ids, None, batch.documents, batch.lengths)

    def forward(self, batch: Batch | Tensor) -> Output:
        hidden = self.hidden(as_batch(batch))
        return Output(hidden, self.head(hidden))

    def start(
        self, batch: Batch | Tensor, *, capacity: int = 0, state: KeyValueState | None = None
    ) -> tuple[Tensor, KeyValueState]:
        """Read the prompts; logits (B, V) of what comes after each. Into `state` where there is one already, whose rows
        may remember beginnings of different lengths."""
        batch = as_batch(batch)
        counts = row_lengths(batch.ids, batch.lengths)
        state = self.new_state(len(counts), capacity) if state is None else state
        state.real = None if batch.lengths is None else counts
        try:
            hidden = self._run(batch.ids, state, lengths=batch.lengths)
        finally:
            state.real = None
        state.advance(counts)
        return self.head(last_of_each(hidden, counts)), state

    def new_state(self, n_rows: int, capacity: int) -> KeyValueState:
        return KeyValueState(len(self.decoder.blocks), n_rows, capacity=capacity)

    def _run(
        self,
        tokens: Tensor,
        state: KeyValueState | None,
        documents: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        n = tokens.shape[1]
        starts = 0 if state is None else state.starts
        longest = n if state is None else state.longest(n)
        self.check_length(longest)
        if documents is None:
            positions = places(starts, n, tokens.device)
            if state is not None and state.real is not None:
                positions = positions.clamp(max=longest - 1)  # padding may lie beyond the last one there is
        else:
            positions = positions_in_documents(documents)
        x = self.embed_at(tokens, positions)
        return self.decoder(x, positions, state=state, lengths=lengths, documents=documents)


class EncoderDecoderModel(GenerativeModel[KeyValueState]):
    """Encoder-decoder families: the source is read once, its keys and values kept in the state."""

    abilities = ("generate", "stream", "translate", "embed", "capture")

    encoder: Stack
    decoder: Stack
    start_id: int  # what the decoder begins with

    def embed_source(self, tokens: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def embed_target(self, tokens: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def encode(self, batch: Batch) -> Tensor:
        """The memory (B, S, E) that cross-attention reads."""
        if batch.source is None:
            raise ValueError("an encoder-decoder reads a source, and the batch has none")
        self.check_length(batch.source.shape[1])
        positions = places(0, batch.source.shape[1], batch.source.device)
        x = self.embed_source(batch.source, positions)
        return self.encoder(x, positions, lengths=batch.source_lengths)

    def hidden(self, batch: Batch) -> Tensor:
        """The decoder's last hidden states (B, T, E) with the true previous tokens (teacher forcing)."""
        if batch.documents is not None:
            raise ValueError("an encoder-decoder does not read packed documents: give each pair a row of its own")
        return self._run(batch.ids, None, self.encode(batch), batch.source_lengths)

    def forward(self, batch: Batch) -> Output:
        hidden = self.hidden(batch)
        return Output(hidden, self.head(hidden))

    def start(self, batch: Batch, *, capacity: int = 0) -> tuple[Tensor, KeyValueState]:
        """Encode the source, read the target so far (`tokens`, or the start token alone): logits (B, V)."""
        memory = self.encode(batch)
        row_lengths(memory, batch.source_lengths)  # an empty source has nothing to look at
        tokens = batch.tokens
        if tokens is None:
            tokens = torch.full((memory.shape[0], 1), self.start_id, device=memory.device)
        counts = row_lengths(tokens, batch.lengths)
        state = KeyValueState(len(self.decoder.blocks), len(counts), cross=True, capacity=capacity)
        state.memory_lengths = batch.source_lengths
        hidden = self._run(tokens, state, memory)
        state.advance(counts)
        return self.head(last_of_each(hidden, counts)), state

    def _run(
        self,
        tokens: Tensor,
        state: KeyValueState | None,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
    ) -> Tensor:
        n = tokens.shape[1]
        self.check_length(n if state is None else state.n_keys(n))
        positions = places(0 if state is None else state.starts, n, tokens.device)
        x = self.embed_target(tokens, positions)
        out: Tensor = self.decoder(x, positions, state=state, memory=memory, memory_lengths=memory_lengths)
        return out
