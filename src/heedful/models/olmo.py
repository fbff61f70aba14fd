"""OLMo 2 (OLMo Team 2025).

LLaMA's layers with the norms moved for stable training (section 3.3): none before a sublayer, one on what it gives
before the sum, and one on all queries and all keys together before they are split into heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heedful.models.mapping import Rule, rule
from heedful.models.rotary import ATTENTION, GATED, HEAD_NORMS, OURS, THEIRS, RotaryConfig, RotaryDecoder
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class OlmoConfig(RotaryConfig):
    vocab_size: int = 50304
    norm_eps: float = 1e-5

    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **RotaryConfig.hub_fixed,
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
    }


class Olmo(RotaryDecoder):
    family = "olmo"
    config_class = OlmoConfig
    config: OlmoConfig

    def block(self, layer: int) -> Block:
        c = self.config
        attention = Attention(
            c.d_model,
            c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
            bias=False,
            query_norm=RMSNorm(c.n_heads * c.d_rotary, c.norm_eps),
            key_norm=RMSNorm((c.n_kv_heads or c.n_heads) * c.d_rotary, c.norm_eps),
        )
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        after = [RMSNorm(c.d_model, c.norm_eps) for _ in range(2)]
        return PreNormBlock(attention, feedforward, Norms(attention_after=after[0], feedforward_after=after[1]))

    def rules(self) -> Sequence[Rule]:
        return (
            *ATTENTION,
            *HEAD_NORMS,
            rule(OURS + "attention_after", THEIRS + "post_attention_layernorm"),
            *GATED,
            rule(OURS + "feedforward_after", THEIRS + "post_feedforward_layernorm"),
        )
