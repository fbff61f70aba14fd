"""Mistral 7B (Jiang et al. 2023).

LLaMA's layers with grouped queries from the start, and a sliding window: each layer sees the last 4096 positions, so
that what lies further back is reached through the layers below (section 2). From version 0.2 on there is no window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heedful.models.rotary import RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class MistralConfig(RotaryConfig):
    """Mistral's settings; the defaults are those of the 7B model without a window."""

    n_kv_heads: int | None = 8
    d_ff: int = 14336
    max_len: int = 131072
    window: int | None = None  # 4096 in version 0.1

    def window_at(self, layer: int) -> int | None:
        """The same window in every layer."""
        return self.window


class Mistral(RotaryDecoder):
    """LLaMA's decoder with a sliding window."""

    family = "mistral"
    config_class = MistralConfig
    config: MistralConfig

    def block(self, layer: int) -> Block:
        """Sliding-window attention and SwiGLU, each after an RMSNorm."""
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
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        norms = Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, feedforward, norms)


# --- the hub's names -------------------------------------------------------------------------------------------------


class MistralLayout(RotaryLayout):
    """`mistral` on the hub."""

    names: Mapping[str, str] = {**RotaryLayout.names, "window": "sliding_window"}
    fixed: Mapping[str, Any] = {
        **RotaryLayout.fixed,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """A missing `sliding_window` means 4096, a null means none."""
        return {"window": 4096, **super().read(hub)}

    def write(self, config: MistralConfig) -> dict[str, Any]:
        """Without a window, `sliding_window` is null rather than missing."""
        return super().write(config) | {"sliding_window": config.window}


MistralConfig.hub = MistralLayout(MistralConfig)
