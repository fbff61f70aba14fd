"""What the decoders after LLaMA share: rotary positions, RMSNorm, and the names of their tensors on the hub.

A family built on it gives its blocks (`RotaryDecoder.block`); embedding, stack, head and most of the hub's layout are
here.

    B batch, T positions, E model width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import DecoderConfig, RotaryPositions
from heedful.models.hub import HubLayout, read_rope, read_rotary_share, write_rope
from heedful.models.mapping import Rule, WeightMap, rule
from heedful.nn.block import Block
from heedful.nn.embed import Embedding
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Rotary
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class RotaryConfig(RotaryPositions, DecoderConfig):
    """The settings that all of them have; the defaults are LLaMA 7B's."""

    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None  # n_heads unless given
    d_head: int | None = None  # d_model / n_heads unless given
    d_ff: int = 11008
    vocab_size: int = 32000
    max_len: int = 2048
    theta: float = 10000.0  # base of the rotation's frequencies
    scaling: Mapping[str, Any] | None = None  # how the rotation is stretched to longer contexts: the hub's rope_scaling
    tied: bool = False  # the head's matrix is the embedding
    norm_eps: float = 1e-6
    attention_dropout: float = 0.0

    scalings: ClassVar[Sequence[str]] = ("default", "linear", "llama3", "yarn")  # the supported rope_types

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = (self.scaling or {}).get("rope_type", "default")
        if kind not in self.scalings:
            raise ValueError(f"rope scaling {kind!r} is not supported here, only {', '.join(self.scalings)}")

    @property
    def d_rotary(self) -> int:
        """The number of dimensions of each head that are rotated."""
        return self.d_head or self.d_model // self.n_heads

    def window_at(self, layer: int) -> int | None:
        """The sliding window of a layer, None for full attention."""
        return None


class RotaryDecoder(DecoderModel):
    """Embedding, blocks, a last RMSNorm, head. A family gives `block`."""

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
        self.head = self.choose_head(tied=self.embed.weight if c.tied else None, softcap=logit_cap)

    def block(self, layer: int) -> Block:
        """The block of this layer, counted from 0."""
        raise NotImplementedError

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens embedded, then blocks that rotate queries and keys, and RMSNorm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.embed(batch.ids)  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)


# --- the hub's names -------------------------------------------------------------------------------------------------


class RotaryLayout(HubLayout):
    """LLaMA's layout, which the others vary."""

    names: Mapping[str, str] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "d_head": "head_dim",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "context_length": "context_length",
        "tied": "tie_word_embeddings",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    }
    fixed: Mapping[str, Any] = {"hidden_act": "silu"}

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, and those of the rotation."""
        theta, scaling = read_rope(hub, self.config_class.theta)
        read = super().read(hub) | {"theta": theta, "scaling": scaling}
        if read.get("n_kv_heads", 0) == read.get("n_heads", self.config_class.n_heads):
            read["n_kv_heads"] = None
        share = read_rotary_share(hub)
        if hasattr(self.config_class, "rotary_share"):
            return read | {"rotary_share": share}
        if share != 1.0:
            raise ValueError(f"a {hub['model_type']} with partial_rotary_factor {share} is not supported")
        return read

    def check(self, config: RotaryConfig, hub: Mapping[str, Any]) -> None:
        """ValueError if `layer_types` has windows in other layers than the config."""
        windows = [config.window_at(i) for i in range(config.n_layers)]
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        if hub.get("layer_types") not in (None, kinds):
            raise ValueError(f"a {hub['model_type']} with layer_types {hub['layer_types']} is not supported")

    def write(self, config: Any) -> dict[str, Any]:
        """The settings in `names`, and those of the rotation."""
        hub = super().write(config)
        # Where the key is missing, transformers takes the number of heads of some published model.
        hub["num_key_value_heads"] = config.n_kv_heads or config.n_heads
        for ours, theirs in self.names.items():
            if hub.get(theirs, 0) is None and getattr(self.config_class, ours) is None:
                del hub[theirs]  # not every program that reads these files expects a null
        return hub | write_rope(config.theta, config.scaling)

    def rules(self, config: Any) -> Sequence[Rule]:
        """The rules for the tensors of a block."""
        return PRE_NORMS + ATTENTION + GATED

    def weight_map(self, model: RotaryDecoder) -> WeightMap:
        """Embedding, last norm and head, and the blocks' `rules`."""
        ignored = [r"rotary_emb\.inv_freq$"] + ([r"^lm_head\.weight$"] if model.config.tied else [])
        around = (
            rule("embed", "model.embed_tokens"),
            rule("decoder.norm", "model.norm"),
            rule("head", "lm_head"),
            rule("head.classifier", "score"),
        )
        return WeightMap([*around, *self.rules(model.config)], prefix="model.", ignored=ignored)


# The rules that most families share; the others replace some.
OURS, THEIRS = "decoder.blocks.{}.", "model.layers.{}."
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
