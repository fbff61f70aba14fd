"""LLaMA 1 to 3.2 (Touvron et al. 2023; Grattafiori et al. 2024), and models of the same architecture, such as SmolLM2.

A pre-norm decoder with RMSNorm, rotary positions, a gated feed-forward (SwiGLU), no biases (other models of the
architecture have some), and grouped queries from LLaMA 2 70B on. LLaMA 3.1 stretches the rotation to 128k tokens. The
paper gives no numbers for the initial weights.

    B batch, T positions, E model width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heedful.models.base import Batch, Output, as_batch
from heedful.models.rotary import RotaryConfig, RotaryDecoder, RotaryLayout
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class LlamaConfig(RotaryConfig):
    """LLaMA's settings; the defaults are those of the 7B model, which has no biases."""

    attention_bias: bool = False  # of the four projections
    mlp_bias: bool = False  # of the feed-forward


class Llama(RotaryDecoder):
    """Token embeddings, decoder blocks with rotary positions, a last RMSNorm, the head."""

    family = "llama"
    config_class = LlamaConfig
    config: LlamaConfig

    def block(self, layer: int) -> Block:
        """Grouped-query attention and SwiGLU, each after an RMSNorm."""
        c = self.config
        return PreNormBlock(
            Attention(
                c.d_model,
                c.n_heads,
                n_kv_heads=c.n_kv_heads,
                d_head=c.d_head,
                bias=c.attention_bias,
                dropout=c.attention_dropout,
            ),
            FeedForward(c.d_model, c.d_ff, "silu", gated=True, bias=c.mlp_bias),
            Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps)),
        )

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens embedded, then blocks that rotate queries and keys, and RMSNorm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.embed(batch.ids)  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T) -> logits (B, T, V) of the token that follows each."""
        batch = as_batch(batch)
        return self.output(self.hidden(batch), batch)  # (B, T, E) -> (B, T, V)


# --- the hub's names -------------------------------------------------------------------------------------------------


class LlamaLayout(RotaryLayout):
    """`llama` on the hub."""

    names: Mapping[str, str] = {
        **RotaryLayout.names,
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    }
    fixed: Mapping[str, Any] = {
        **RotaryLayout.fixed,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


LlamaConfig.hub = LlamaLayout(LlamaConfig)
