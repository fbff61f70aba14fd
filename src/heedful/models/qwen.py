"""Qwen 2, 2.5 and 3, the dense models (Yang et al. 2024a, 2024b, 2025).

LLaMA's layers with grouped queries. Qwen 2 and 2.5 have biases on queries, keys and values; Qwen 3 drops them, makes
the head's size free and puts an RMSNorm on each head's query and key, which keeps the scores small. A window for the
upper layers is in the config but in no published model's use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heedful.models.mapping import Rule
from heedful.models.rotary import HEAD_NORMS, RotaryConfig, RotaryDecoder
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm


@dataclass(frozen=True)
class QwenConfig(RotaryConfig):
    d_ff: int = 22016
    vocab_size: int = 151936
    max_len: int = 32768
    head_norms: bool = False  # Qwen 3: norms on queries and keys, and no biases
    window: int | None = None
    full_layers: int = 28  # so many layers see everything even if there is a window

    hub_names: ClassVar[Mapping[str, str]] = {
        **RotaryConfig.hub_names,
        "window": "sliding_window",
        "full_layers": "max_window_layers",
    }

    def window_at(self, layer: int) -> int | None:
        return self.window if layer >= self.full_layers else None

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        read = super().read_hub(hub)
        # The window's width is written down whether it is used or not.
        read["window"] = hub.get("sliding_window", 4096) if hub.get("use_sliding_window") else None
        if hub["model_type"] == "qwen2":
            return read
        if hub.get("attention_bias"):
            raise ValueError("a qwen3 with attention_bias True is not supported, only False")
        return {"d_head": 128, **read, "head_norms": True}

    def to_hub(self) -> dict[str, Any]:
        hub = super().to_hub() | {"use_sliding_window": self.window is not None}
        if not self.head_norms:
            return hub | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        hub |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        return hub | {"head_dim": self.d_rotary, "attention_bias": False}


class Qwen(RotaryDecoder):
    family = "qwen"
    config_class = QwenConfig
    config: QwenConfig

    def block(self, layer: int) -> Block:
        c = self.config
        attention = Attention(
            c.d_model,
            c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
            bias=not c.head_norms,
            output_bias=False,
            window=c.window_at(layer),
            query_norm=RMSNorm(c.d_rotary, c.norm_eps) if c.head_norms else None,
            key_norm=RMSNorm(c.d_rotary, c.norm_eps) if c.head_norms else None,
        )
        feedforward = FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=False)
        return PreNormBlock(
            attention, feedforward, Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps))
        )

    def rules(self) -> Sequence[Rule]:
        return (*super().rules(), *HEAD_NORMS)
