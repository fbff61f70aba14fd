"""What LLaMA settled and the decoders after it kept: rotary positions, RMSNorm, and the names of their tensors.

A family of this kind says what its blocks are; embedding, stack, head and the common rows of the map are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import Config, read_rope, read_rotary_share, write_rope
from heedful.models.mapping import Rule, WeightMap, rule
from heedful.nn.block import Block
from heedful.nn.embed import Embedding
from heedful.nn.head import LanguageHead
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Rotary
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState

OURS, THEIRS = "decoder.blocks.{}.", "model.layers.{}."


@dataclass(frozen=True)
class RotaryConfig(Config):
    """The settings all of them have, with LLaMA 7B's values."""

    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None  # as many as n_heads unless given
    d_head: int | None = None  # d_model / n_heads unless given
    d_ff: int = 11008
    vocab_size: int = 32000
    max_len: int = 2048
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None  # the hub's `rope_scaling`
    tied: bool = False
    norm_eps: float = 1e-6

    hub_names: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "d_head": "head_dim",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "tied": "tie_word_embeddings",
        "norm_eps": "rms_norm_eps",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_dropout": 0.0}
    scalings: ClassVar[Sequence[str]] = ("default", "linear", "llama3", "yarn")

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = (self.scaling or {}).get("rope_type", "default")
        if kind not in self.scalings:
            raise ValueError(f"rope scaling {kind!r} is not supported here, only {', '.join(self.scalings)}")

    @property
    def d_rotary(self) -> int:
        """How much of each head is rotated."""
        return self.d_head or self.d_model // self.n_heads

    def window_at(self, layer: int) -> int | None:
        """How far back this layer sees, None without a limit."""
        return None

    @classmethod
    def from_hub(cls, hub: Mapping[str, Any]) -> Self:
        config = super().from_hub(hub)
        windows = [config.window_at(i) for i in range(config.n_layers)]
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        if hub.get("layer_types") not in (None, kinds):
            raise ValueError(f"a {hub['model_type']} with layer_types {hub['layer_types']} is not supported")
        return config

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        theta, scaling = read_rope(hub, cls.theta)
        read = super().read_hub(hub) | {"theta": theta, "scaling": scaling}
        share = read_rotary_share(hub)
        if "rotary_share" in cls.__dataclass_fields__:
            return read | {"rotary_share": share}
        if share != 1.0:
            raise ValueError(f"a {hub['model_type']} with partial_rotary_factor {share} is not supported")
        return read

    def to_hub(self) -> dict[str, Any]:
        hub = super().to_hub()
        for ours, theirs in self.hub_names.items():
            if hub[theirs] is None and getattr(type(self), ours) is None:
                del hub[theirs]  # not every program that reads these files expects a null
        return hub | write_rope(self.theta, self.scaling)


class RotaryDecoder(DecoderModel):
    """Embedding, blocks, a last RMSNorm, head. A family gives `block`, and `rules` where its names differ."""

    config: Any

    def __init__(
        self,
        config: RotaryConfig,
        *,
        embed_scale: float | None = None,
        norm_offset: float = 0.0,
        logit_cap: float | None = None,
    ) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model, scale=embed_scale)
        self.decoder = Stack(
            [self.block(i) for i in range(c.n_layers)],
            causal=True,
            norm=RMSNorm(c.d_model, c.norm_eps, offset=norm_offset),
            rotary=Rotary(c.d_rotary, theta=c.theta, scaling=c.scaling, max_len=c.max_len),
        )
        tied = self.embed.weight if c.tied else None
        self.head = LanguageHead(c.d_model, c.vocab_size, tied=tied, softcap=logit_cap)

    def block(self, layer: int) -> Block:
        """The layer of this number, counted from 0."""
        raise NotImplementedError

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens embedded, then blocks that rotate queries and keys, and RMSNorm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.embed(batch.ids)  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)

    def tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.embed.weight

    def rules(self) -> Sequence[Rule]:
        """The rows of the map that lie inside a block."""
        return PRE_NORMS + ATTENTION + GATED

    def weight_map(self) -> WeightMap:
        ignored = [r"rotary_emb\.inv_freq$"] + ([r"^lm_head\.weight$"] if self.config.tied else [])
        around = (
            rule("embed", "model.embed_tokens"),
            rule("decoder.norm", "model.norm"),
            rule("head", "lm_head"),
        )
        return WeightMap([*around, *self.rules()], prefix="model.", ignored=ignored)


# The rows most families share; those with something else there put their own in place.
PRE_NORMS = (
    rule(OURS + "attention_norm", THEIRS + "input_layernorm"),
    rule(OURS + "feedforward_norm", THEIRS + "post_attention_layernorm"),
)
ATTENTION = (
    rule(OURS + "attention.query", THEIRS + "self_attn.q_proj"),
    rule(OURS + "attention.key", THEIRS + "self_attn.k_proj"),
    rule(OURS + "attention.value", THEIRS + "self_attn.v_proj"),
    rule(OURS + "attention.output", THEIRS + "self_attn.o_proj"),
)
HEAD_NORMS = (
    rule(OURS + "attention.query_norm", THEIRS + "self_attn.q_norm"),
    rule(OURS + "attention.key_norm", THEIRS + "self_attn.k_norm"),
)
GATED = (
    rule(OURS + "feedforward.gate", THEIRS + "mlp.gate_proj"),
    rule(OURS + "feedforward.up", THEIRS + "mlp.up_proj"),
    rule(OURS + "feedforward.down", THEIRS + "mlp.down_proj"),
)
