"""GPT-NeoX 20B (Black et al. 2022) and Pythia (Biderman et al. 2023).

Attention and feed-forward work side by side as in GPT-J, each with a norm of its own (a few relatives go one after
the other). Rotary positions turn the first quarter of each head. Everything has biases but the head, which is its own
matrix unless tied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import Config, read_dropout, read_rope, write_rope
from heedful.models.mapping import FuseHeads, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, ParallelBlock, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.position import Rotary
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState

DROPOUTS = ("hidden_dropout", "attention_dropout")


@dataclass(frozen=True)
class GPTNeoXConfig(Config):
    d_model: int = 6144
    n_layers: int = 44
    n_heads: int = 64
    d_ff: int = 24576
    vocab_size: int = 50432
    max_len: int = 2048
    rotated: float = 0.25  # which part of each head turns with the position
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None  # the hub's `rope_scaling`
    parallel: bool = True
    attention_bias: bool = True
    tied: bool = False
    act: str = "gelu"
    norm_eps: float = 1e-5
    dropout: float = 0.0

    hub_names: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "parallel": "use_parallel_residual",
        "attention_bias": "attention_bias",
        "tied": "tie_word_embeddings",
        "act": "hidden_act",
        "norm_eps": "layer_norm_eps",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rotated <= 1:
            raise ValueError(f"rotated is {self.rotated}: it is the part of each head that turns, up to 1")

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        # The first configs had rotary_emb_base and rotary_pct, newer ones keep both in rope_parameters.
        table = dict(hub.get("rope_parameters") or hub.get("rope_scaling") or {})
        rotated = table.pop("partial_rotary_factor", hub.get("rotary_pct", cls.rotated))
        base = hub.get("rotary_emb_base", cls.theta)
        theta, scaling = read_rope({"rope_theta": base, "rope_parameters": table})
        return super().read_hub(hub) | {
            "dropout": read_dropout(hub, DROPOUTS, cls.dropout),
            "rotated": rotated,
            "theta": theta,
            "scaling": scaling,
        }

    def to_hub(self) -> dict[str, Any]:
        hub = super().to_hub() | write_rope(self.theta, self.scaling) | dict.fromkeys(DROPOUTS, self.dropout)
        hub["rope_parameters"]["partial_rotary_factor"] = self.rotated
        return hub | {"rotary_pct": self.rotated, "rotary_emb_base": self.theta}


class GPTNeoX(DecoderModel):
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
        self.head = LanguageHead(c.d_model, c.vocab_size, tied=self.embed.weight if c.tied else None)

    @staticmethod
    def _block(c: GPTNeoXConfig) -> Block:
        return (ParallelBlock if c.parallel else PreNormBlock)(
            Attention(c.d_model, c.n_heads, bias=c.attention_bias, dropout=c.dropout),
            FeedForward(c.d_model, c.d_ff, c.act),
            Norms(nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps)),
            dropout=c.dropout,
        )

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens embedded, then the blocks and the last norm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids))  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)

    def tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        """√(2/5d), and 2/(L√d) for the projections into the residual stream (Black et al. 2022, section 2.1.3)."""
        super().init_weights()
        d, n_layers = self.config.d_model, self.config.n_layers
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("attention.output.weight", "feedforward.down.weight"))
                nn.init.normal_(p, std=2 / (n_layers * math.sqrt(d)) if residual else math.sqrt(2 / (5 * d)))

    def weight_map(self) -> WeightMap:
        ours, theirs = "decoder.blocks.{}.", "gpt_neox.layers.{}."
        fused = [ours + f"attention.{part}" for part in ("query", "key", "value")]
        tied = [r"^embed_out\.weight$", r"^lm_head\.weight$"] if self.config.tied else []
        return WeightMap(
            [
                rule("embed", "gpt_neox.embed_in"),
                rule(ours + "attention_norm", theirs + "input_layernorm"),
                rule(fused, theirs + "attention.query_key_value", FuseHeads(self.config.n_heads)),
                rule(ours + "attention.output", theirs + "attention.dense"),
                rule(ours + "feedforward_norm", theirs + "post_attention_layernorm"),
                rule(ours + "feedforward.up", theirs + "mlp.dense_h_to_4h"),
                rule(ours + "feedforward.down", theirs + "mlp.dense_4h_to_h"),
                rule("decoder.norm", "gpt_neox.final_layer_norm"),
                rule("head", "embed_out"),
            ],
            prefix="gpt_neox.",
            ignored=[r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$", *tied],
            renamed={r"^lm_head\.": "embed_out."},  # what the reference calls it in memory
        )
