"""Mistral 7B (Jiang et al. 2023).

LLaMA's layers with grouped queries from the start, and a sliding window: each layer sees the last 4096 positions, so
that what lies further back is reached through the layers below (section 2). From version 0.2 on there is no window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from heedful.models.rotary import RotaryConfig, RotaryDecoder
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class MistralConfig(RotaryConfig):
    n_kv_heads: int | None = 8
    d_ff: int = 14336
    max_len: int = 131072
    window: int | None = None  # 4096 in version 0.1

    hub_names: ClassVar[Mapping[str, str]] = {**RotaryConfig.hub_names, "window": "sliding_window"}
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **RotaryConfig.hub_fixed,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }

    def window_at(self, layer: int) -> int | None:
        return self.window

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        return {"window": 4096, **super().read_hub(hub)}  # only a null says that there is none

    def to_hub(self) -> dict[str, Any]:
        return super().to_hub() | {"sliding_window": self.window}


class Mistral(RotaryDecoder):
    family = "mistral"
    config_class = MistralConfig
    config: MistralConfig

    def block(self, layer: int) -> Block:
        c = self.config
        return PreNormBlock(
            Attention(
                c.d_model,
                c.n_heads,
                n_kv_heads=c.n_kv_heads,
                d_head=c.d_head,
                bias=False,
                window=c.window,
            ),
            FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False),
            Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps)),
        )
