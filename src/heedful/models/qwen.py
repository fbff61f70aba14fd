"""Qwen 2, 2.5 and 3, the dense models (Yang et al. 2024a, 2024b, 2025).

LLaMA's layers with grouped queries. Qwen 2 and 2.5 have biases on queries, keys and values; Qwen 3 drops them, makes
the head size free and puts an RMSNorm on each head's query and key, which keeps the scores small. The config can give
the upper layers a sliding window; no published model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.models.mapping import Rule
from heedful.models.rotary import HEAD_NORMS, RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class QwenConfig(RotaryConfig):
    """Qwen's settings."""

    d_ff: int = 22016
    vocab_size: int = 151936
    max_len: int = 32768
    head_norms: bool = False  # Qwen 3: norms on queries and keys, and no biases
    attention_bias: bool = False  # Qwen 3 with biases on all four projections
    window: int | None = None
    full_layers: int = 28  # the first layers, which have no window

    def window_at(self, layer: int) -> int | None:
        """A window above the first `full_layers` layers."""
        return self.window if layer >= self.full_layers else None


class Qwen(RotaryDecoder):
    """LLaMA's decoder with biases (Qwen 2) or norms (Qwen 3) on queries and keys."""

    family = "qwen"
    config_class = QwenConfig
    config: QwenConfig

    def block(self, layer: int) -> Block:
        """Grouped-query attention and SwiGLU, each after an RMSNorm."""
        c = self.config
        attention = Attention(
            c.d_model,
            c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
            bias=c.attention_bias or not c.head_norms,
            output_bias=c.attention_bias,
            window=c.window_at(layer),
            query_norm=RMSNorm(c.d_rotary, c.norm_eps) if c.head_norms else None,
            key_norm=RMSNorm(c.d_rotary, c.norm_eps) if c.head_norms else None,
            dropout=c.attention_dropout,
        )
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        norms = Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, feedforward, norms)


# --- the hub's names -------------------------------------------------------------------------------------------------


class QwenLayout(RotaryLayout):
    """`qwen2` for Qwen 2 and 2.5, `qwen3` for Qwen 3."""

    names: Mapping[str, str] = {
        **RotaryLayout.names,
        "window": "sliding_window",
        "full_layers": "max_window_layers",
    }

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Settings from either config.json."""
        read = super().read(hub)
        # The window's width is there even if `use_sliding_window` is off.
        read["window"] = hub.get("sliding_window", 4096) if hub.get("use_sliding_window") else None
        if hub["model_type"] == "qwen2":
            return read
        return {"d_head": 128, **read, "head_norms": True, "attention_bias": bool(hub.get("attention_bias"))}

    def write(self, config: QwenConfig) -> dict[str, Any]:
        """The config.json of Qwen 2 or, with head norms, of Qwen 3."""
        hub = super().write(config) | {"use_sliding_window": config.window is not None}
        if not config.head_norms and config.attention_bias:
            raise ValueError("the hub has no layout for Qwen 2 with a bias on attention's output")
        if not config.head_norms:
            return hub | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        hub |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        return hub | {"head_dim": config.d_rotary, "attention_bias": config.attention_bias}

    def rules(self, config: QwenConfig) -> Sequence[Rule]:
        """LLaMA's, and those of the head norms."""
        return (*super().rules(config), *HEAD_NORMS)


QwenConfig.hub = QwenLayout(QwenConfig)
