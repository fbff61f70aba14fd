"""Phi-3 and its successors with the same layout (Abdin et al. 2024): mini and medium, of 4k and of 128k tokens.

LLaMA's layers; the 4k models have a window of 2047. The 128k models divide each frequency of the rotation by a number
of its own (LongRoPE, Ding et al. 2024), one set up to 4096 tokens and another beyond. In the files queries, keys and
values are one matrix, and so are the feed-forward's two inner ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from heedful.models.base import Batch
from heedful.models.mapping import Fuse, Rule, rule
from heedful.models.rotary import OURS, PRE_NORMS, THEIRS, RotaryConfig, RotaryDecoder
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.state import Cache, KeyValueState, without


@dataclass(frozen=True)
class PhiConfig(RotaryConfig):
    d_model: int = 3072
    d_ff: int = 8192
    vocab_size: int = 32064
    max_len: int = 4096
    rotary_share: float = 1.0  # of each head, from Phi-4-mini on
    norm_eps: float = 1e-5
    window: int | None = None

    hub_names: ClassVar[Mapping[str, str]] = {**RotaryConfig.hub_names, "window": "sliding_window"}
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **RotaryConfig.hub_fixed,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }

    scalings: ClassVar[Sequence[str]] = ("default", "longrope")

    @property
    def d_rotary(self) -> int:
        return int((self.d_head or self.d_model // self.n_heads) * self.rotary_share)

    def window_at(self, layer: int) -> int | None:
        return self.window

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        read = super().read_hub(hub)
        scaling = read["scaling"]
        if scaling is None:
            return read
        if scaling["rope_type"] in ("su", "yarn"):  # early names of the same
            scaling["rope_type"] = "longrope"
        # The key beside the table counts more than the one in it; 4096 is what a missing one means.
        inside = scaling.get("original_max_position_embeddings", 4096)
        scaling["original_max_position_embeddings"] = hub.get("original_max_position_embeddings", inside)
        return read

    def to_hub(self) -> dict[str, Any]:
        hub = super().to_hub()
        if self.rotary_share != 1.0:
            hub["partial_rotary_factor"] = self.rotary_share
            hub["rope_parameters"]["partial_rotary_factor"] = self.rotary_share
        if self.scaling is not None:
            hub["original_max_position_embeddings"] = self.scaling["original_max_position_embeddings"]
        if self.vocab_size <= 32000:
            hub["pad_token_id"] = None  # the reference's default is 32000
        return hub


class LongRopeState(KeyValueState):
    """Keeps the tokens too: a row that passes LongRoPE's switch length is rotated, and therefore computed, anew."""

    switch_length: int

    def __init__(self, n_layers: int, n_rows: int, switch_length: int, *, capacity: int = 0) -> None:
        super().__init__(n_layers, n_rows, capacity=capacity)
        self.switch_length = switch_length
        self.is_long = [False] * n_rows  # how the keys of each row are rotated
        self.tokens = Cache(self)  # (B, 1, S, 1)

    def append(self, tokens: Tensor) -> Tensor:
        """Append new tokens (B, T) to those of each row; returns all of them (B, S)."""
        new = tokens[:, None, :, None]
        return self.tokens.extend(new, new)[0][:, 0, :, 0]

    def switches(self, n: int) -> bool:
        """Whether n more tokens, or fewer since `truncate`, bring some row across the switch length."""
        rows = zip(self.lengths, self.is_long, strict=True)
        return any(was != (length + n > self.switch_length) for length, was in rows if length)

    def advance(self, counts: int | Sequence[int]) -> None:
        super().advance(counts)
        self.is_long = [length > self.switch_length for length in self.lengths]

    def _part(self) -> None:
        super()._part()
        self.tokens = self.tokens.copy(self)

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        self.tokens.select(rows)
        self.is_long = [self.is_long[row] for row in rows]

    def _join(self, other: Self, rows: list[int]) -> None:
        super()._join(other, rows)
        self.tokens.join(other.tokens, rows, max((other.lengths[r] for r in rows), default=0))
        self.is_long = self.is_long + [other.is_long[r] for r in rows]

    def _drop(self, row: int) -> None:
        super()._drop(row)
        self.tokens.drop(row)
        self.is_long = without(self.is_long, row)


class Phi(RotaryDecoder):
    family = "phi"
    config_class = PhiConfig
    config: PhiConfig

    def block(self, layer: int) -> Block:
        c = self.config
        attention = Attention(
            c.d_model, c.n_heads, n_kv_heads=c.n_kv_heads, d_head=c.d_head, bias=False, window=c.window
        )
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        norms = Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, feedforward, norms)

    def new_state(self, n_rows: int, capacity: int) -> KeyValueState:
        rotary = self.decoder.rotary
        if rotary is None or rotary.switch_length is None:
            return super().new_state(n_rows, capacity)
        return LongRopeState(len(self.decoder.blocks), n_rows, rotary.switch_length, capacity=capacity)

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E). If some row grows past LongRoPE's switch length, its keys are rotated
        anew, and with them all keys and values above the first layer: all rows are computed again."""
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

    def rules(self) -> Sequence[Rule]:
        query_key_value = [OURS + f"attention.{part}" for part in ("query", "key", "value")]
        gate_up = [OURS + "feedforward.gate", OURS + "feedforward.up"]
        return (
            *PRE_NORMS,
            rule(query_key_value, THEIRS + "self_attn.qkv_proj", Fuse()),
            rule(OURS + "attention.output", THEIRS + "self_attn.o_proj"),
            rule(gate_up, THEIRS + "mlp.gate_up_proj", Fuse()),
            rule(OURS + "feedforward.down", THEIRS + "mlp.down_proj"),
        )
