"""Mixtral 8x7B and 8x22B (Jiang et al. 2024): a mixture of experts.

Mistral without its window, whose feed-forward is eight experts of which a router picks two for each token: 47 billion
parameters, of which a token uses 13 (section 2.1). Balancing the experts' load in training is not the paper's subject
and not done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.models.mapping import Rule, rule
from heedful.models.rotary import ATTENTION, OURS, PRE_NORMS, THEIRS, RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class MixtralConfig(RotaryConfig):
    """Mixtral's settings; the defaults are those of 8x7B."""

    n_kv_heads: int | None = 8
    d_ff: int = 14336  # of each expert
    max_len: int = 131072
    theta: float = 1e6
    norm_eps: float = 1e-5
    window: int | None = None
    n_experts: int = 8
    n_chosen: int = 2  # experts per token

    def window_at(self, layer: int) -> int | None:
        """The same window in every layer."""
        return self.window


class Mixtral(RotaryDecoder):
    """Mistral's decoder with a mixture of experts for a feed-forward."""

    family = "mixtral"
    config_class = MixtralConfig
    config: MixtralConfig

    def block(self, layer: int) -> Block:
        """Attention and the experts, each after an RMSNorm."""
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
        experts = [FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False) for _ in range(c.n_experts)]
        norms = Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, MixtureOfExperts(c.d_model, experts, top_k=c.n_chosen), norms)


# --- the hub's names -------------------------------------------------------------------------------------------------


class MixtralLayout(RotaryLayout):
    """`mixtral` on the hub."""

    names: Mapping[str, str] = {
        **RotaryLayout.names,
        "window": "sliding_window",
        "n_experts": "num_local_experts",
        "n_chosen": "num_experts_per_tok",
    }
    fixed: Mapping[str, Any] = {
        **RotaryLayout.fixed,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
    }
    written: Mapping[str, Any] = {"router_jitter_noise": 0.0, "output_router_logits": False}

    def rules(self, config: MixtralConfig) -> Sequence[Rule]:
        """A router, and three matrices for each expert."""
        ours, theirs = OURS + "feedforward.", THEIRS + "block_sparse_moe."
        return (
            *PRE_NORMS,
            *ATTENTION,
            rule(ours + "router", theirs + "gate"),
            rule(ours + "experts.{}.gate", theirs + "experts.{}.w1"),
            rule(ours + "experts.{}.up", theirs + "experts.{}.w3"),
            rule(ours + "experts.{}.down", theirs + "experts.{}.w2"),
        )


MixtralConfig.hub = MixtralLayout(MixtralConfig)
