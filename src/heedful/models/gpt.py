"""GPT-1, GPT-2 and GPT-3 (Radford et al. 2018, 2019; Brown et al. 2020).

A decoder with learned positions and a tied head. GPT-1 normalizes after each sum as the original Transformer did;
GPT-2 before each sublayer, and once more at the end. GPT-3 is GPT-2 with every other layer "locally banded", that is
with a sliding window. The paper does not give the window's width; 256 is GPT-Neo's, the first published replication's.

    B batch, T positions, E model width, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel, Output, as_batch
from heedful.models.config import DecoderConfig
from heedful.models.hub import HubLayout
from heedful.models.mapping import Fuse, Transpose, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PostNormBlock, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.position import Learned
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """GPT's settings; the defaults are those of the smallest GPT-2 (124M)."""

    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    d_head: int | None = None  # d_model / n_heads unless given; GPT-3 13B has 40 heads of 128 in a width of 5140
    d_ff: int | None = None  # 4 x d_model unless given
    vocab_size: int = 50257
    max_len: int = 1024
    norm_first: bool = True  # False: GPT-1
    band: int | None = None  # GPT-3: the window of layers 1, 3, 5, ...
    act: str = "gelu_new"
    norm_eps: float = 1e-5
    tied: bool = True  # the head's matrix is the embedding
    dropout: float = 0.1
    embed_dropout: float | None = None  # `dropout` unless given
    attention_dropout: float | None = None  # `dropout` unless given


class GPT(DecoderModel):
    """Token and position embeddings, decoder blocks, a last norm (not in GPT-1), the head."""

    family = "gpt"
    config_class = GPTConfig
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.position = Learned(c.max_len, c.d_model)
        self.dropout = nn.Dropout(c.dropout if c.embed_dropout is None else c.embed_dropout)
        self.decoder = Stack(
            [self._block(c, c.band if i % 2 else None) for i in range(c.n_layers)],
            causal=True,
            norm=nn.LayerNorm(c.d_model, c.norm_eps) if c.norm_first else None,
        )
        self.head = self.choose_head(tied=self.embed.weight if c.tied else None)

    @staticmethod
    def _block(c: GPTConfig, window: int | None) -> Block:
        dropout = c.dropout if c.attention_dropout is None else c.attention_dropout
        attention = Attention(c.d_model, c.n_heads, d_head=c.d_head, window=window, dropout=dropout)
        feedforward = FeedForward(c.d_model, c.d_ff or 4 * c.d_model, c.act)
        norms = Norms(nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps))
        kind = PreNormBlock if c.norm_first else PostNormBlock
        return kind(attention, feedforward, norms, dropout=c.dropout)

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens and positions embedded, then the blocks and the last norm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids) + self.position(positions))  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T) -> logits (B, T, V) of the token that follows each."""
        batch = as_batch(batch)
        return self.output(self.hidden(batch), batch)  # (B, T, E) -> (B, T, V)

    def init_weights(self) -> None:
        """N(0, 0.02); the projections into the residual stream smaller by 1/√(2 layers) (GPT-2, section 2.3)."""
        super().init_weights()
        for name, p in self.named_parameters():
            if name.endswith(("attention.output.weight", "feedforward.down.weight")) and self.config.norm_first:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layers))


# --- the hub's names -------------------------------------------------------------------------------------------------


class GPTLayout(HubLayout):
    """`openai-gpt` for GPT-1, `gpt2` for GPT-2; GPT-3 has none."""

    names: Mapping[str, str] = {
        "d_model": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "vocab_size": "vocab_size",
        "max_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    }
    fixed: Mapping[str, Any] = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    dropouts: Mapping[str, str] = {
        "dropout": "resid_pdrop",
        "embed_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    }

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Settings from either config.json; GPT-1's has other defaults."""
        read = super().read(hub)
        if hub["model_type"] == "gpt2":
            return read | {"act": hub.get("activation_function", "gelu_new"), "d_ff": hub.get("n_inner")}
        act = hub.get("afn", "gelu")  # GPT-1's "gelu" is the tanh form
        first = {"vocab_size": 40478, "max_len": 512, "norm_first": False}
        return first | read | {"act": "gelu_new" if act == "gelu" else act}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """The config.json of GPT-1 or GPT-2."""
        if config.band is not None or config.d_head is not None:
            raise ValueError("the hub has no layout for GPT-3's banded layers or free head size")
        hub = super().write(config)
        hub["n_ctx"] = config.max_len  # the old name of n_positions, which llama.cpp's converter reads
        if config.norm_first:
            hub |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
            return hub | {"activation_function": config.act, "n_inner": config.d_ff}
        hub |= {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]}
        return hub | {"afn": "gelu" if config.act == "gelu_new" else config.act}

    def weight_map(self, model: GPT) -> WeightMap:
        """One matrix for query, key and value; matrices are (in, out)."""
        second = model.config.norm_first
        ours, theirs = "decoder.blocks.{}.", "transformer.h.{}."
        fused = [ours + f"attention.{part}" for part in ("query", "key", "value")]
        return WeightMap(
            [
                rule("embed", "transformer.wte" if second else "transformer.tokens_embed"),
                rule("position", "transformer.wpe" if second else "transformer.positions_embed"),
                rule(ours + "attention_norm", theirs + "ln_1"),
                rule(fused, theirs + "attn.c_attn", Fuse(transposed=True)),
                rule(ours + "attention.output", theirs + "attn.c_proj", Transpose()),
                rule(ours + "feedforward_norm", theirs + "ln_2"),
                rule(ours + "feedforward.up", theirs + "mlp.c_fc", Transpose()),
                rule(ours + "feedforward.down", theirs + "mlp.c_proj", Transpose()),
                rule("decoder.norm", "transformer.ln_f"),
                rule("head", "lm_head"),
                rule("head.classifier", "score"),
            ],
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$", *([r"^lm_head\.weight$"] if model.config.tied else [])),
        )


GPTConfig.hub = GPTLayout(GPTConfig)
