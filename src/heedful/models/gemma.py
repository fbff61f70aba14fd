"""Gemma 1 and 2 (Gemma Team 2024a, 2024b).

Embeddings times √d_model and tied to the head, RMSNorms that store their weight minus 1, a feed-forward gated with
GELU, heads of 256. Gemma 2 adds norms after each sublayer, a window for every other layer from the first on, and soft
caps: scores and logits pass through cap · tanh(x / cap).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.models.mapping import Rule, rule
from heedful.models.rotary import ATTENTION, GATED, OURS, PRE_NORMS, THEIRS, RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm

TANH_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class GemmaConfig(RotaryConfig):
    """Gemma's settings; the defaults are those of Gemma 7B."""

    d_model: int = 3072
    n_layers: int = 28
    n_heads: int = 16
    d_head: int | None = 256
    d_ff: int = 24576
    vocab_size: int = 256000
    max_len: int = 8192
    tied: bool = True
    attention_bias: bool = False  # of the four projections
    # Gemma 2:
    after_norms: bool = False
    query_scale: float | None = None  # scores are divided by its square root; d_head unless given
    score_cap: float | None = None
    logit_cap: float | None = None
    window: int | None = None  # of layers 0, 2, 4, ...

    def window_at(self, layer: int) -> int | None:
        """A window in every other layer, from the first on."""
        return self.window if layer % 2 == 0 else None


class Gemma(RotaryDecoder):
    """A decoder with scaled embeddings, GELU gates and, in Gemma 2, norms on both sides of each sublayer."""

    family = "gemma"
    config_class = GemmaConfig
    config: GemmaConfig

    def __init__(self, config: GemmaConfig) -> None:
        scale = math.sqrt(config.d_model)
        super().__init__(config, embed_scale=scale, norm_offset=1.0, logit_cap=config.logit_cap)

    def block(self, layer: int) -> Block:
        """Attention and a gated feed-forward, each after an RMSNorm; in Gemma 2 each is followed by one too."""
        c = self.config

        def norm() -> RMSNorm:
            return RMSNorm(c.d_model, c.norm_eps, offset=1.0)

        norms = Norms(norm(), norm())
        if c.after_norms:
            norms.attention_after, norms.feedforward_after = norm(), norm()
        attention = Attention(
            c.d_model,
            c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
            bias=c.attention_bias,
            dropout=c.attention_dropout,
            scale=None if c.query_scale is None else 1 / math.sqrt(c.query_scale),
            window=c.window_at(layer),
            softcap=c.score_cap,
        )
        return PreNormBlock(attention, FeedForward(c.d_model, c.d_ff, TANH_GELU, gated=True, bias=False), norms)


# --- the hub's names -------------------------------------------------------------------------------------------------

# The settings that only Gemma 2 has, and what a missing key means in its config.json.
GEMMA2_NAMES: Mapping[str, str] = {
    "query_scale": "query_pre_attn_scalar",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "window": "sliding_window",
}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}


class GemmaLayout(RotaryLayout):
    """`gemma` and `gemma2` on the hub."""

    names: Mapping[str, str] = {**RotaryLayout.names, "attention_bias": "attention_bias"}
    fixed: Mapping[str, Any] = {}

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Settings from either config.json."""
        if hub.get("use_bidirectional_attention"):
            raise ValueError(f"a {hub['model_type']} with use_bidirectional_attention is not supported")
        second = hub["model_type"] == "gemma2"
        act = hub.get("hidden_activation" if second else "hidden_act", TANH_GELU)
        if act != TANH_GELU and (second or act != "gelu"):  # Gemma 1's files say "gelu" and mean the tanh form
            raise ValueError(f"a {hub['model_type']} with the activation {act!r} is not supported")
        if not second:
            return super().read(hub)
        hub = {**GEMMA2_DEFAULTS, **hub}
        more = {ours: hub[theirs] for ours, theirs in GEMMA2_NAMES.items()}
        return super().read(hub) | more | {"after_norms": True}

    def write(self, config: GemmaConfig) -> dict[str, Any]:
        """The config.json of Gemma 1 or, with norms after the sublayers, of Gemma 2."""
        hub = super().write(config) | {"hidden_act": TANH_GELU, "hidden_activation": TANH_GELU}
        more = {theirs: getattr(config, ours) for ours, theirs in GEMMA2_NAMES.items()}
        if not config.after_norms:
            if any(value is not None for value in more.values()):
                raise ValueError("the hub has no layout for Gemma 1 with Gemma 2's window, caps or scale")
            return hub | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
        more["query_pre_attn_scalar"] = config.query_scale or config.d_rotary
        return hub | more | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}

    def rules(self, config: GemmaConfig) -> Sequence[Rule]:
        """LLaMA's; Gemma 2 names the norm before the feed-forward otherwise, and has two after the sublayers."""
        if not config.after_norms:
            return super().rules(config)
        return (
            PRE_NORMS[0],
            *ATTENTION,
            rule(OURS + "attention_after", THEIRS + "post_attention_layernorm"),
            rule(OURS + "feedforward_norm", THEIRS + "pre_feedforward_layernorm"),
            *GATED,
            rule(OURS + "feedforward_after", THEIRS + "post_feedforward_layernorm"),
        )


GemmaConfig.hub = GemmaLayout(GemmaConfig)
