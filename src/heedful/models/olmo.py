"""OLMo 2 (OLMo Team 2025).

LLaMA's layers with the norms moved for stable training (section 3.3): none before a sublayer, one on its output before
the sum, and one on all queries and all keys together before they are split into heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.models.mapping import Rule, rule
from heedful.models.rotary import ATTENTION, GATED, HEAD_NORMS, OURS, THEIRS, RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class OlmoConfig(RotaryConfig):
    """OLMo 2's settings."""

    vocab_size: int = 50304
    norm_eps: float = 1e-5
    attention_bias: bool = False  # of the four projections


class Olmo(RotaryDecoder):
    """LLaMA's decoder with norms after the sublayers, and on queries and keys."""

    family = "olmo"
    config_class = OlmoConfig
    config: OlmoConfig

    def block(self, layer: int) -> Block:
        """Attention with query and key norms, and SwiGLU; an RMSNorm on the output of each."""
        c = self.config
        attention = Attention(
            c.d_model,
            c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
            bias=c.attention_bias,
            dropout=c.attention_dropout,
            query_norm=RMSNorm(c.n_heads * c.d_rotary, c.norm_eps),
            key_norm=RMSNorm((c.n_kv_heads or c.n_heads) * c.d_rotary, c.norm_eps),
        )
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        after = [RMSNorm(c.d_model, c.norm_eps) for _ in range(2)]
        return PreNormBlock(attention, feedforward, Norms(attention_after=after[0], feedforward_after=after[1]))


# --- the hub's names -------------------------------------------------------------------------------------------------


class OlmoLayout(RotaryLayout):
    """`olmo2` on the hub."""

    names: Mapping[str, str] = {**RotaryLayout.names, "attention_bias": "attention_bias"}
    fixed: Mapping[str, Any] = {
        **RotaryLayout.fixed,
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
    }

    def rules(self, config: OlmoConfig) -> Sequence[Rule]:
        """The norms have places of their own."""
        return (
            *ATTENTION,
            *HEAD_NORMS,
            rule(OURS + "attention_after", THEIRS + "post_attention_layernorm"),
            *GATED,
            rule(OURS + "feedforward_after", THEIRS + "post_feedforward_layernorm"),
        )


OlmoConfig.hub = OlmoLayout(OlmoConfig)
