"""Mixtral 8x7B and 8x22B (Jiang et al. 2024).

Mistral without its window, whose feed-forward is eight experts of which a router picks two for each token: 47 billion
parameters, of which a token uses 13 (section 2.1). Balancing the experts' load in training is not the paper's subject
and not done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heedful.models.mapping import Rule, rule
from heedful.models.rotary import ATTENTION, OURS, PRE_NORMS, THEIRS, RotaryConfig, RotaryDecoder
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class MixtralConfig(RotaryConfig):
    n_kv_heads: int | None = 8
    d_ff: int = 14336
    max_len: int = 131072
    theta: float = 1e6
    norm_eps: float = 1e-5
    window: int | None = None
    n_experts: int = 8
    n_chosen: int = 2  # experts per token

    hub_names: ClassVar[Mapping[str, str]] = {
        **RotaryConfig.hub_names,
        "window": "sliding_window",
        "n_experts": "num_local_experts",
        "n_chosen": "num_experts_per_tok",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **RotaryConfig.hub_fixed,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }

    def window_at(self, layer: int) -> int | None:
        return self.window


class Mixtral(RotaryDecoder):
    family = "mixtral"
    config_class = MixtralConfig
    config: MixtralConfig

    def block(self, layer: int) -> Block:
        c = self.config
        attention = Attention(
            c.d_model, c.n_heads, n_kv_heads=c.n_kv_heads, d_head=c.d_head, bias=False, window=c.window
        )
        experts = [FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False) for _ in range(c.n_experts)]
        norms = Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, MixtureOfExperts(c.d_model, experts, top_k=c.n_chosen), norms)

    def rules(self) -> Sequence[Rule]:
        ours, theirs = OURS + "feedforward.", THEIRS + "block_sparse_moe."
        return (
            *PRE_NORMS,
            *ATTENTION,
            rule(ours + "router", theirs + "gate"),
            rule(ours + "experts.{}.gate", theirs + "experts.{}.w1"),
            rule(ours + "experts.{}.up", theirs + "experts.{}.w3"),
            rule(ours + "experts.{}.down", theirs + "experts.{}.w2"),
        )
