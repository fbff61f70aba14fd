"""GPT-NeoX 20B (Black et al. 2022) and Pythia (Biderman et al. 2023).

Parallel blocks as in GPT-J, in which attention and feed-forward have a norm each (a few models run them one after the
other). Rotary positions rotate the first quarter of each head's dimensions. All layers have biases but the head, which
is a matrix of its own unless tied.

    B batch, T positions, E model width
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import DecoderConfig, RotaryPositions
from heedful.models.hub import HubLayout, read_rope, write_rope
from heedful.models.mapping import FuseHeads, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, ParallelBlock, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.position import Rotary
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class GPTNeoXConfig(RotaryPositions, DecoderConfig):
    """GPT-NeoX's settings; the defaults are those of the 20B model."""

    d_model: int = 6144
    n_layers: int = 44
    n_heads: int = 64
    d_ff: int = 24576
    vocab_size: int = 50432
    max_len: int = 2048
    rotated: float = 0.25  # share of each head's dimensions that is rotated
    theta: float = 10000.0  # base of the rotation's frequencies
    scaling: Mapping[str, Any] | None = None  # how the rotation is stretched to longer contexts: the hub's rope_scaling
    parallel: bool = True  # False: attention first, then the feed-forward
    attention_bias: bool = True
    tied: bool = False  # the head's matrix is the embedding
    act: str = "gelu"
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float | None = None  # `dropout` unless given

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rotated <= 1:
            raise ValueError(f"rotated is {self.rotated}: it is the share of each head that is rotated, up to 1")


class GPTNeoX(DecoderModel):
    """Token embeddings, parallel blocks with rotary positions, a last norm, the head."""

    family = "gpt_neox"
    config_class = GPTNeoXConfig
    config: GPTNeoXConfig

    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        d_rotary = int(c.d_model // c.n_heads * c.rotated)
        self.decoder = Stack(
            [self._block(c) for _ in range(c.n_layers)],
            causal=True,
            norm=nn.LayerNorm(c.d_model, c.norm_eps),
            rotary=Rotary(d_rotary, theta=c.theta, scaling=c.scaling, max_len=c.max_len),
        )
        self.head = self.choose_head(tied=self.embed.weight if c.tied else None)

    @staticmethod
    def _block(c: GPTNeoXConfig) -> Block:
        dropout = c.dropout if c.attention_dropout is None else c.attention_dropout
        return (ParallelBlock if c.parallel else PreNormBlock)(
            Attention(c.d_model, c.n_heads, bias=c.attention_bias, dropout=dropout),
            FeedForward(c.d_model, c.d_ff, c.act),
            Norms(nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps)),
            dropout=c.dropout,
        )

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens embedded, then the blocks and the last norm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids))  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)

    def init_weights(self) -> None:
        """Standard deviation √(2/5d), and 2/(L√d) for the projections into the residual stream (section 2.1.3)."""
        super().init_weights()
        d, n_layers = self.config.d_model, self.config.n_layers
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("attention.output.weight", "feedforward.down.weight"))
                nn.init.normal_(p, std=2 / (n_layers * math.sqrt(d)) if residual else math.sqrt(2 / (5 * d)))


# --- the hub's names -------------------------------------------------------------------------------------------------


class GPTNeoXLayout(HubLayout):
    """`gpt_neox` on the hub."""

    names: Mapping[str, str] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "context_length": "context_length",
        "parallel": "use_parallel_residual",
        "attention_bias": "attention_bias",
        "tied": "tie_word_embeddings",
        "act": "hidden_act",
        "norm_eps": "layer_norm_eps",
    }
    fixed: Mapping[str, Any] = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
    }
    dropouts: Mapping[str, str] = {"dropout": "hidden_dropout", "attention_dropout": "attention_dropout"}

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, and those of the rotation."""
        # The first configs had rotary_emb_base and rotary_pct, newer ones keep both in rope_parameters.
        table = dict(hub.get("rope_parameters") or hub.get("rope_scaling") or {})
        rotated = table.pop("partial_rotary_factor", hub.get("rotary_pct", GPTNeoXConfig.rotated))
        base = hub.get("rotary_emb_base", GPTNeoXConfig.theta)
        theta, scaling = read_rope({"rope_theta": base, "rope_parameters": table})
        return super().read(hub) | {"rotated": rotated, "theta": theta, "scaling": scaling}

    def write(self, config: GPTNeoXConfig) -> dict[str, Any]:
        """The settings in `names`, and those of the rotation under their old and new keys."""
        hub = super().write(config) | write_rope(config.theta, config.scaling)
        hub["rope_parameters"]["partial_rotary_factor"] = config.rotated
        return hub | {"rotary_pct": config.rotated, "rotary_emb_base": config.theta}

    def weight_map(self, model: GPTNeoX) -> WeightMap:
        """One matrix for query, key and value, head by head."""
        ours, theirs = "decoder.blocks.{}.", "gpt_neox.layers.{}."
        fused = [ours + f"attention.{part}" for part in ("query", "key", "value")]
        tied = [r"^embed_out\.weight$", r"^lm_head\.weight$"] if model.config.tied else []
        return WeightMap(
            [
                rule("embed", "gpt_neox.embed_in"),
                rule(ours + "attention_norm", theirs + "input_layernorm"),
                rule(fused, theirs + "attention.query_key_value", FuseHeads(model.config.n_heads)),
                rule(ours + "attention.output", theirs + "attention.dense"),
                rule(ours + "feedforward_norm", theirs + "post_attention_layernorm"),
                rule(ours + "feedforward.up", theirs + "mlp.dense_h_to_4h"),
                rule(ours + "feedforward.down", theirs + "mlp.dense_4h_to_h"),
                rule("decoder.norm", "gpt_neox.final_layer_norm"),
                rule("head", "embed_out"),
                rule("head.classifier", "score"),
            ],
            prefix="gpt_neox.",
            ignored=[r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$", *tied],
            renamed={r"^lm_head\.": "embed_out."},  # its name in the reference implementation
        )


GPTNeoXConfig.hub = GPTNeoXLayout(GPTNeoXConfig)
