"""Phi-3 and its successors of the same architecture (Abdin et al. 2024): mini and medium, of 4k and of 128k tokens.

LLaMA's layers; the 4k models have a sliding window of 2047. The 128k models rescale each frequency of the rotation by a
factor of its own (LongRoPE, Ding et al. 2024), with one list of factors up to 4096 tokens and another beyond. In the
files queries, keys and values are one matrix, and so are the feed-forward's gate and up projections.

    B batch, T positions, S positions in the state, E model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from heedful.models.base import Batch
from heedful.models.mapping import Fuse, Rule, rule
from heedful.models.rotary import OURS, PRE_NORMS, THEIRS, RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.state import Cache, KeyValueState, swap_remove


@dataclass(frozen=True)
class PhiConfig(RotaryConfig):
    """Phi's settings; the defaults are those of Phi-3 mini 4k."""

    d_model: int = 3072
    d_ff: int = 8192
    vocab_size: int = 32064
    max_len: int = 4096
    rotary_share: float = 1.0  # of each head's dimensions; less than 1 from Phi-4-mini on
    norm_eps: float = 1e-5
    window: int | None = None
    dropout: float = 0.0  # of each sublayer

    scalings: ClassVar[Sequence[str]] = ("default", "longrope")

    @property
    def d_rotary(self) -> int:
        """The number of dimensions of each head that are rotated."""
        return int((self.d_head or self.d_model // self.n_heads) * self.rotary_share)

    def window_at(self, layer: int) -> int | None:
        """The same window in every layer."""
        return self.window


class Phi(RotaryDecoder):
    """LLaMA's decoder with a sliding window or LongRoPE."""

    family = "phi"
    config_class = PhiConfig
    config: PhiConfig

    def block(self, layer: int) -> Block:
        """Sliding-window attention and SwiGLU, each after an RMSNorm."""
        c = self.config
        attention = Attention(
            c.d_model,
            c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
            bias=False,
            window=c.window,
            dropout=c.attention_dropout,
        )
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        norms = Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, feedforward, norms, dropout=c.dropout)

    def new_state(self, n_rows: int, capacity: int) -> KeyValueState:
        """An empty state of this many rows; with LongRoPE, one that keeps the tokens too."""
        rotary = self.decoder.rotary
        if rotary is None or rotary.switch_length is None:
            return super().new_state(n_rows, capacity)
        n_layers, kind = len(self.decoder.blocks), self.kv_cache
        return LongRopeState(n_layers, n_rows, rotary.switch_length, capacity=capacity, kind=kind)

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E). If some row grows past LongRoPE's switch length, its keys are rotated
        anew, and with them all keys and values above the first layer change: all rows are computed again."""
        if not isinstance(state, LongRopeState):
            return super().hidden(batch, state)
        ids = state.append(batch.ids)  # (B, S)
        n = batch.ids.shape[1]
        if not state.switches(n):
            return super().hidden(batch, state)
        again = super().new_state(state.n_rows, state.capacity)
        counts = torch.tensor([length + n for length in state.lengths], device=ids.device)
        hidden = super().hidden(Batch(ids, counts), again)  # (B, S, E)
        for old, new in zip(state.caches, again.caches, strict=True):
            old.keys, old.values = new.keys, new.values
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        return hidden[rows, counts[:, None] - n + torch.arange(n, device=ids.device)]  # (B, T, E)


class LongRopeState(KeyValueState):
    """A KV cache that keeps the tokens too: a row that passes LongRoPE's switch length is computed again from them."""

    switch_length: int

    def __init__(self, n_layers: int, n_rows: int, switch_length: int, **settings: Any) -> None:
        super().__init__(n_layers, n_rows, **settings)
        self.switch_length = switch_length
        self.is_long = [False] * n_rows  # by which factors the keys of each row are rotated
        self.tokens = Cache(self)  # (B, 1, S, 1)

    def append(self, tokens: Tensor) -> Tensor:
        """Append new tokens (B, T) to those of each row; returns all of them (B, S)."""
        new = tokens[:, None, :, None]
        return self.tokens.extend(new, new)[0][:, 0, :, 0]

    def switches(self, n: int) -> bool:
        """Whether n more tokens bring some row above the switch length, or `truncate` has brought one below it."""
        rows = zip(self.lengths, self.is_long, strict=True)
        return any(was != (length + n > self.switch_length) for length, was in rows if length)

    def advance(self, counts: int | Sequence[int]) -> None:
        """Count the new tokens of all rows, or of each, as part of the sequence."""
        super().advance(counts)
        self.is_long = [length > self.switch_length for length in self.lengths]

    def _unshare(self) -> None:
        super()._unshare()
        self.tokens = self.tokens.copy(self)

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        self.tokens.select(rows)
        self.is_long = [self.is_long[row] for row in rows]

    def _append_rows(self, other: Self, rows: list[int]) -> None:
        super()._append_rows(other, rows)
        self.tokens.append_rows(other.tokens, rows, max((other.lengths[r] for r in rows), default=0))
        self.is_long = self.is_long + [other.is_long[r] for r in rows]

    def _remove_row(self, row: int) -> None:
        super()._remove_row(row)
        self.tokens.remove_row(row)
        self.is_long = swap_remove(self.is_long, row)


# --- the hub's names -------------------------------------------------------------------------------------------------


class PhiLayout(RotaryLayout):
    """`phi3` on the hub."""

    names: Mapping[str, str] = {**RotaryLayout.names, "window": "sliding_window", "dropout": "resid_pdrop"}
    fixed: Mapping[str, Any] = {
        **RotaryLayout.fixed,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
    }

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """LongRoPE has had several names, and its switch length several places."""
        read = super().read(hub)
        scaling = read["scaling"]
        if scaling is None:
            return read
        if scaling["rope_type"] in ("su", "yarn"):  # early names of longrope
            scaling["rope_type"] = "longrope"
        # The top-level key takes precedence over the one in the table; if both are missing it is 4096.
        inside = scaling.get("original_max_position_embeddings", 4096)
        scaling["original_max_position_embeddings"] = hub.get("original_max_position_embeddings", inside)
        return read

    def write(self, config: PhiConfig) -> dict[str, Any]:
        """The rotated share and LongRoPE's switch length are written in both of their places."""
        hub = super().write(config)
        if config.rotary_share != 1.0:
            hub["partial_rotary_factor"] = config.rotary_share
            hub["rope_parameters"]["partial_rotary_factor"] = config.rotary_share
        if config.scaling is not None:
            hub["original_max_position_embeddings"] = config.scaling["original_max_position_embeddings"]
        if config.vocab_size <= 32000:
            hub["pad_token_id"] = None  # the reference's default is 32000
        return hub

    def rules(self, config: PhiConfig) -> Sequence[Rule]:
        """One matrix for query, key and value, and one for gate and up."""
        query_key_value = [OURS + f"attention.{part}" for part in ("query", "key", "value")]
        gate_up = [OURS + "feedforward.gate", OURS + "feedforward.up"]
        return (
            *PRE_NORMS,
            rule(query_key_value, THEIRS + "self_attn.qkv_proj", Fuse()),
            rule(OURS + "attention.output", THEIRS + "self_attn.o_proj"),
            rule(gate_up, THEIRS + "mlp.gate_up_proj", Fuse()),
            rule(OURS + "feedforward.down", THEIRS + "mlp.down_proj"),
        )


PhiConfig.hub = PhiLayout(PhiConfig)
