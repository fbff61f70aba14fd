"""The interface of every family.

    forward(batch) -> Output             training and scoring
    start(batch)   -> logits, State      prefill: the prompt, or the source encoded once
    step(tokens, state) -> logits        decoding: one more token per row, or several

A batch is padded on the right; `lengths` has the number of real tokens per row. The state is passed in and returned:
nothing about a sequence is stored on a module.

    B batch, T positions, S source positions, E model width, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from heedful.models.config import Config, RotaryPositions
from heedful.models.mapping import WeightMap, identity
from heedful.nn.block import Block
from heedful.nn.embed import Embedding
from heedful.nn.head import LabelHead, LanguageHead
from heedful.nn.int8_cache import CacheType, cache_bytes, check_cache_type
from heedful.nn.mask import positions_in_documents
from heedful.nn.norm import RMSNorm
from heedful.nn.stack import Stack, position_ids
from heedful.nn.state import KeyValueState, State


@dataclass
class Batch:
    """A model's input. Ids are int64; padding is on the right, with any value."""

    tokens: Tensor | None = None  # (B, T) a decoder's or an encoder-only model's input
    lengths: Tensor | None = None  # (B,) real tokens per row, None if no row is padded
    source: Tensor | None = None  # (B, S) the encoder's input of an encoder-decoder
    source_lengths: Tensor | None = None  # (B,)
    segments: Tensor | None = None  # (B, T) BERT's sentence A or B
    documents: Tensor | None = None  # (B, T) the index of the packed document of each token
    images: Tensor | None = None  # (B, channels, height, width)
    targets: Tensor | None = None  # (B, T) ids, (B,) labels, or (B, 2) first and last token of an answer
    next_sentence: Tensor | None = None  # (B,) BERT's target: 0 if sentence B follows A, 1 if not
    rewards: Tensor | None = None  # (B, C) of choices (B, C, T)
    log_probs: Tensor | None = None  # (B, C, T) of the targets, by the model that sampled the choices

    @property
    def ids(self) -> Tensor:
        """The tokens; ValueError if the batch has none."""
        if self.tokens is None:
            raise ValueError("this model reads tokens, and the batch has none")
        return self.tokens

    def flattened(self) -> Batch:
        """Choices (B, C, T) as rows (B·C, T); a batch without choices unchanged."""
        if self.ids.ndim == 2:
            return self
        given = {name: getattr(self, name) for name in ("tokens", "lengths", "segments")}
        return replace(self, **{name: None if x is None else x.flatten(0, 1) for name, x in given.items()})


@dataclass
class Output:
    """A model's output: its last hidden states, the logits of its head, and what else the head computes."""

    hidden: Tensor  # (B, T, E)
    logits: Tensor | None = None  # (B, T, V), or (B, C) of a classifier
    extra: dict[str, Tensor] = field(default_factory=dict)


class Model(nn.Module):
    """Base of all families."""

    family: ClassVar[str]
    config_class: ClassVar[type[Config]]
    config: Any
    # The methods that a loaded model offers (see heedful.loaded); families and heads add theirs.
    abilities: tuple[str, ...] = ("capture",)
    kv_cache: CacheType | None = None  # how its states store keys and values; None: as they are computed

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # Contents of a model's files beside its settings, kept for saving: special tokens by the hub's keys
        # ("eos_token_id": an id or a list), generation_config.json, and for images preprocessor_config.json.
        self.special: dict[str, Any] = {}
        self.generation: dict[str, Any] = {}
        self.preprocessor: dict[str, Any] = {}

    @classmethod
    def create(cls, config: Config, *, device: str | torch.device = "cpu") -> Self:
        """A new model with its paper's initial weights; on the device "meta", one with shapes alone."""
        with torch.device("meta"):
            model = cls(config)
        if torch.device(device).type != "meta":
            model.to_empty(device=device)
            model.tie()
            model.init_weights()
        return model

    def init_weights(self) -> None:
        """N(0, 0.02), biases 0, norms 1, as most papers or their code do; other families override it."""
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
        """Make tied parameters the same object again after their memory was replaced."""

    def weight_map(self) -> WeightMap:
        """The map between our tensors' names and the hub's; a family without a layout there keeps ours."""
        layout = self.config.hub
        if layout is None:
            return identity(dict(self.named_parameters()))
        return replace(layout.weight_map(self), leaves_out=True)

    def n_parameters(self) -> int:
        """The number of parameters; modules that store them in another form count them in `n_weights`."""
        stored = sum(getattr(module, "n_weights", 0) for module in self.modules())
        return stored + sum(p.numel() for p in self.parameters())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def context_length(self) -> int | None:
        """The longest sequence that the model reads, None if there is no limit."""
        longest: int | None = self.config.longest
        return longest

    def set_context_length(self, n: int) -> None:
        """Let the model read n tokens at once, more than it was trained for or fewer; ValueError if its positions are
        a table, or have no limit."""
        if not isinstance(self.config, RotaryPositions):
            limit = "no limit" if self.context_length is None else f"a limit of {self.context_length} by its positions"
            raise ValueError(f"the context length of a {self.family} cannot be set: it has {limit}")
        self.config = self.config.replace(context_length=n)

    def set_kv_cache(self, kind: CacheType) -> None:
        """Store the keys and values of new states in 8 bits ("int8"); ValueError if this model caches none."""
        check_cache_type(kind)
        if not self.kv_bytes_per_token():
            raise ValueError(f"a {self.family} has no KV cache to be stored as {kind}: leave out kv_cache (--kv-cache)")
        self.kv_cache = kind

    def kv_bytes_per_token(self, kind: CacheType | None = None) -> int:
        """Bytes of the KV cache per token, of self- and cross-attention: float32, or stored as `kind`; 0 for a model
        that has none."""
        if "generate" not in self.abilities:
            return 0
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        layers = [part for block in blocks for part in (block.attention, block.cross) if part is not None]
        return sum(2 * layer.n_kv_heads * cache_bytes(layer.d_head, kind) for layer in layers)

    def check_length(self, n: int, whose: str = "") -> None:
        """ValueError if n tokens are more than the context length; `whose` they are begins the message."""
        longest = self.context_length
        if longest is None or n <= longest:
            return
        problem = f"{whose}{n} tokens do not fit: this model has positions for {longest}; shorten the text"
        if isinstance(self.config, RotaryPositions):
            problem = f"{whose}{n} tokens do not fit: this model's context length is {longest}; shorten the text, or "
            problem += "load the model with a longer context_length (--context-length)"
        raise ValueError(problem)


class TruncationWarning(UserWarning):
    """A text or a completion is cut because the model's context ends."""


def as_batch(batch: Batch | Tensor) -> Batch:
    """Token ids (B, T) as a batch; a batch unchanged."""
    return Batch(tokens=batch) if isinstance(batch, Tensor) else batch


def row_lengths(tokens: Tensor, lengths: Tensor | None) -> list[int]:
    """The number of real tokens of each row; ValueError if a row has none."""
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
    """Base of the families that generate: `start` prefills, `step` decodes. S is the type of their state."""

    head: nn.Module

    def hidden(self, batch: Batch, state: S | None = None) -> Tensor:
        """The last hidden states (B, T, E) of the batch's tokens, which follow those in the state if there is one."""
        raise NotImplementedError

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T) -> logits (B, T, V) of the token that follows each."""
        hidden = self.hidden(as_batch(batch))
        return Output(hidden, self.head(hidden))

    def start(self, batch: Batch, *, capacity: int = 0) -> tuple[Tensor, S]:
        """Prefill, or encode the source: logits (B, V) of the next token. `capacity`: tokens to allocate memory for."""
        raise NotImplementedError

    def step(self, tokens: Tensor, state: S, *, last: bool = False) -> Tensor:
        """Decode one token per row (B,) -> logits (B, V), or several (B, T) -> (B, T, V), or (B, V) of the `last`."""
        several = tokens if tokens.ndim == 2 else tokens[:, None]
        hidden = self.hidden(Batch(several), state)
        state.advance(several.shape[1])
        return self.head(hidden[:, -1] if last or tokens.ndim == 1 else hidden)

    def positions(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The position of each token (B or 1, T): after those in the state, from 0 in each packed document. ValueError
        if one is beyond the context length."""
        n, device = batch.ids.shape[1], batch.ids.device
        if state is None:
            self.check_length(n)
            return position_ids(0, n, device) if batch.documents is None else positions_in_documents(batch.documents)
        if batch.lengths is None:
            self.check_length(max(state.lengths) + n)
            return position_ids(state.starts, n, device)
        longest = max(at + count for at, count in zip(state.lengths, batch.lengths.tolist(), strict=True))
        self.check_length(longest)
        return position_ids(state.starts, n, device).clamp(max=longest - 1)  # padding may be beyond the last


class DecoderModel(GenerativeModel[KeyValueState]):
    """Base of the decoder-only families: embedding, decoder, head."""

    abilities: tuple[str, ...] = ("generate", "stream", "fill", "embed", "neighbours", "capture")

    embed: Embedding
    decoder: Stack

    def choose_head(self, **options: Any) -> nn.Module:
        """The head of the config: the language head with these options, a classifier of the last token, or none. The
        other two take away the abilities that need the first."""
        c, kind = self.config, self.config.head
        if kind == "language":
            return LanguageHead(c.d_model, c.vocab_size, **options)
        self.abilities = (*(["classify"] if kind == "classify" else []), "embed", "neighbours", "capture")
        return LabelHead(c.d_model, c.n_labels) if kind == "classify" else nn.Identity()

    def tie(self) -> None:
        """The language head's matrix is the embedding, if they are tied."""
        if isinstance(self.head, LanguageHead) and getattr(self.config, "tied", False):
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T) -> logits (B, T, V) of the token that follows each; of a classifier (B, L)."""
        batch = as_batch(batch)
        return self.output(self.hidden(batch), batch)

    def output(self, hidden: Tensor, batch: Batch) -> Output:
        """The last hidden states (B, T, E), and the head's logits: of every token, or of each row's last real one."""
        if isinstance(self.head, nn.Identity):
            return Output(hidden)
        if not isinstance(self.head, LabelHead):
            return Output(hidden, self.head(hidden))
        if batch.documents is not None:
            raise ValueError("a classifier reads one text per row: do not pack documents")
        last = last_of_each(hidden, row_lengths(batch.ids, batch.lengths))  # (B, E)
        return Output(hidden, self.head(last))

    def start(
        self, batch: Batch | Tensor, *, capacity: int = 0, state: KeyValueState | None = None
    ) -> tuple[Tensor, KeyValueState]:
        """Prefill: logits (B, V) of the token that follows each prompt. With a `state`, the prompts continue its rows,
        which may have different lengths."""
        batch = as_batch(batch)
        counts = row_lengths(batch.ids, batch.lengths)
        state = self.new_state(len(counts), capacity) if state is None else state
        hidden = self.hidden(batch, state)
        state.advance(counts)
        return self.head(last_of_each(hidden, counts)), state

    def new_state(self, n_rows: int, capacity: int) -> KeyValueState:
        """An empty state of this many rows."""
        return KeyValueState(len(self.decoder.blocks), n_rows, capacity=capacity, kind=self.kv_cache)

    def scoring_state(self, n_rows: int) -> KeyValueState | None:
        """A state for scoring whole texts: one where it rounds keys and values, so that scores include that; else
        None, since a text that is scored at once needs no cache."""
        return None if self.kv_cache is None else self.new_state(n_rows, 0)


class EncoderDecoderModel(GenerativeModel[KeyValueState]):
    """Base of the encoder-decoder families: the source is encoded once, its keys and values are kept in the state."""

    abilities: tuple[str, ...] = ("generate", "stream", "translate", "embed", "neighbours", "capture")

    encoder: Stack
    decoder: Stack
    start_id: int  # the token that the target begins with

    def encode(self, batch: Batch) -> Tensor:
        """The encoder's output (B, S, E), the memory that the decoder attends to."""
        raise NotImplementedError

    def decode(self, batch: Batch, memory: Tensor | None, state: KeyValueState | None = None) -> Tensor:
        """The decoder's last hidden states (B, T, E); `memory` may be None once the state holds its keys and values."""
        raise NotImplementedError

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The decoder's last hidden states (B, T, E), with the true previous tokens (teacher forcing)."""
        return self.decode(batch, self.encode(batch) if state is None else None, state)

    def source_positions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The source (B, S) and its positions (1, S); ValueError if there is none or it is too long."""
        if batch.source is None:
            raise ValueError("an encoder-decoder reads a source, and the batch has none")
        if batch.documents is not None:
            raise ValueError("an encoder-decoder does not read packed documents: give each pair a row of its own")
        self.check_length(batch.source.shape[1])
        return batch.source, position_ids(0, batch.source.shape[1], batch.source.device)

    def start(
        self, batch: Batch, *, capacity: int = 0, state: KeyValueState | None = None
    ) -> tuple[Tensor, KeyValueState]:
        """Encode the source and prefill the target so far (`tokens`, or the start token): logits (B, V). With a
        `state`, which is empty, its rows are those of the batch."""
        memory = self.encode(batch)
        row_lengths(memory, batch.source_lengths)  # there is nothing to attend to in an empty source
        tokens = batch.tokens
        if tokens is None:
            tokens = torch.full((memory.shape[0], 1), self.start_id, device=memory.device)
        counts = row_lengths(tokens, batch.lengths)
        state = self.new_state(len(counts), capacity) if state is None else state
        state.memory_lengths = batch.source_lengths
        hidden = self.decode(Batch(tokens, batch.lengths), memory, state)
        state.advance(counts)
        return self.head(last_of_each(hidden, counts)), state

    def new_state(self, n_rows: int, capacity: int) -> KeyValueState:
        """An empty state of this many rows."""
        return KeyValueState(len(self.decoder.blocks), n_rows, cross=True, capacity=capacity, kind=self.kv_cache)
