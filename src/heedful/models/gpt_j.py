"""GPT-J (Wang & Komatsuzaki 2021).

A decoder with parallel blocks: attention and feed-forward both read one norm's output, and both are added to the
residual stream at once. Rotary positions rotate the first `d_rotary` dimensions of each head, in neighbouring pairs.
Attention has no biases; the head is a matrix of its own, with a bias.

    B batch, T positions, E model width
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import DecoderConfig, RotaryPositions
from heedful.models.hub import HubLayout
from heedful.models.mapping import WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, ParallelBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.position import Rotary
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class GPTJConfig(RotaryPositions, DecoderConfig):
    """GPT-J's settings; the defaults are those of the 6B model."""

    d_model: int = 4096
    n_layers: int = 28
    n_heads: int = 16
    d_rotary: int = 64  # dimensions of each head that are rotated
    d_ff: int | None = None  # 4 x d_model unless given
    vocab_size: int = 50400
    max_len: int = 2048
    act: str = "gelu_new"
    norm_eps: float = 1e-5
    dropout: float = 0.0
    embed_dropout: float | None = None  # `dropout` unless given
    attention_dropout: float | None = None  # `dropout` unless given

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_rotary > self.d_model // self.n_heads:
            raise ValueError(f"d_rotary {self.d_rotary} is more than a head's {self.d_model // self.n_heads}")


class GPTJ(DecoderModel):
    """Token embeddings, parallel blocks with rotary positions, a last norm, an untied head."""

    family = "gpt_j"
    config_class = GPTJConfig
    config: GPTJConfig

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.dropout = nn.Dropout(c.dropout if c.embed_dropout is None else c.embed_dropout)
        self.decoder = Stack(
            [self._block(c) for _ in range(c.n_layers)],
            causal=True,
            norm=nn.LayerNorm(c.d_model, c.norm_eps),
            rotary=Rotary(c.d_rotary, layout="interleaved"),
        )
        self.head = self.choose_head(bias=True)

    @staticmethod
    def _block(c: GPTJConfig) -> Block:
        dropout = c.dropout if c.attention_dropout is None else c.attention_dropout
        return ParallelBlock(
            Attention(c.d_model, c.n_heads, bias=False, dropout=dropout),
            FeedForward(c.d_model, c.d_ff or 4 * c.d_model, c.act),
            Norms(nn.LayerNorm(c.d_model, c.norm_eps)),
            dropout=c.dropout,
        )

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens embedded, then the blocks and the last norm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids))  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)


# --- the hub's names -------------------------------------------------------------------------------------------------


class GPTJLayout(HubLayout):
    """`gptj` on the hub."""

    names: Mapping[str, str] = {
        "d_model": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "d_rotary": "rotary_dim",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_len": "n_positions",
        "context_length": "context_length",
        "act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    }
    fixed: Mapping[str, Any] = {
        "model_type": "gptj",
        "architectures": ["GPTJForCausalLM"],
        "tie_word_embeddings": False,
    }
    dropouts: Mapping[str, str] = {
        "dropout": "resid_pdrop",
        "embed_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    }

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`; a null `rotary_dim` is refused."""
        if hub.get("rotary_dim", 64) is None:
            raise ValueError("a gptj without rotary_dim is not supported: give the number of rotated dimensions")
        return super().read(hub)

    def weight_map(self, model: GPTJ) -> WeightMap:
        """The names of the tensors; buffers with masks are ignored."""
        ours, theirs = "decoder.blocks.{}.", "transformer.h.{}."
        return WeightMap(
            [
                rule("embed", "transformer.wte"),
                rule(ours + "attention_norm", theirs + "ln_1"),
                rule(ours + "attention.query", theirs + "attn.q_proj"),
                rule(ours + "attention.key", theirs + "attn.k_proj"),
                rule(ours + "attention.value", theirs + "attn.v_proj"),
                rule(ours + "attention.output", theirs + "attn.out_proj"),
                rule(ours + "feedforward.up", theirs + "mlp.fc_in"),
                rule(ours + "feedforward.down", theirs + "mlp.fc_out"),
                rule("decoder.norm", "transformer.ln_f"),
                rule("head", "lm_head"),
                rule("head.classifier", "score"),
            ],
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$",),
        )


GPTJConfig.hub = GPTJLayout(GPTJConfig)
