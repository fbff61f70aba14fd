"""The original Transformer (Vaswani et al. 2017), and Marian's translators on the hub, which have its shape.

An encoder reads the source; a decoder writes the target and attends to the encoder's output. Each sublayer is
norm(x + f(x)); one matrix is both embeddings and the head (section 3.4). The options are later habits: norms first, a
last norm on encoder and decoder (torch.nn.Transformer has both), separate vocabularies.

Marian's models (OPUS-MT, Tiedemann & Thottingal 2020) put all sines before all cosines, add a bias to the logits that
is not trained, and begin the target with padding, whose embedding is zero and not trained either.

Table 3's variations (B), keys smaller than values, and (E), learned positions, are not here.

    B batch, T target, S source, E model width, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, EncoderDecoderModel, Output, as_batch
from heedful.models.config import Config
from heedful.models.hub import HubLayout
from heedful.models.mapping import Reshape, Rule, WeightMap, identity, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PostNormBlock, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.position import Layout, Sinusoidal
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class TransformerConfig(Config):
    """The Transformer's settings; the defaults are those of the base model (table 3)."""

    d_model: int = 512
    n_layers: int = 6
    n_decoder_layers: int | None = None  # n_layers unless given
    n_heads: int = 8
    n_decoder_heads: int | None = None  # n_heads unless given
    d_ff: int = 2048
    d_decoder_ff: int | None = None  # d_ff unless given
    vocab_size: int = 37000
    target_vocab_size: int | None = None  # vocab_size unless given
    max_len: int | None = None  # None: sinusoids have no end; Marian stores a table
    shared: bool = True  # one embedding for source and target
    tied: bool = True  # the head's matrix is the target's embedding
    norm_first: bool = False
    final_norms: bool = False  # one more norm at the end of encoder and decoder
    positions: Layout = "interleaved"  # sines and cosines; "halves": first all sines (Marian)
    scale_embedding: bool = True  # by √d_model
    head_bias: bool = False  # added to the logits, not trained (Marian)
    act: str = "relu"
    dropout: float = 0.1  # of the embeddings' sum and of every sublayer (section 5.4)
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    start_id: int = 0  # what the target begins with
    pad_id: int | None = None  # a token whose embedding is not trained (Marian)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in ("interleaved", "halves"):
            raise ValueError(f"positions {self.positions!r} are not interleaved or halves")
        if self.shared and self.n_target != self.vocab_size:
            raise ValueError(f"a shared embedding has one vocabulary, not {self.vocab_size} and {self.n_target} tokens")
        for name in "start_id", "pad_id":
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.n_target:
                raise ValueError(f"{name} is {token}, and the target's vocabulary has {self.n_target} tokens")

    @property
    def n_target(self) -> int:
        """The size of the target's vocabulary."""
        return self.target_vocab_size or self.vocab_size


class Transformer(EncoderDecoderModel):
    """Embeddings with sinusoidal positions, an encoder, a decoder that attends to its output, the head."""

    family = "transformer"
    config_class = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        c = config
        scale = math.sqrt(c.d_model) if c.scale_embedding else None
        self.source_embed = Embedding(c.vocab_size, c.d_model, scale=scale)
        self.target_embed = self.source_embed if c.shared else Embedding(c.n_target, c.d_model, scale=scale)
        self.position = Sinusoidal(c.d_model, layout=c.positions)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = self._stack(c.n_layers, decoder=False)
        self.decoder = self._stack(c.n_decoder_layers or c.n_layers, decoder=True)
        tied = self.target_embed.weight if c.tied else None
        self.head = LanguageHead(c.d_model, c.n_target, tied=tied, bias=c.head_bias)
        if self.head.bias is not None:
            self.head.bias.requires_grad_(False)
        self.start_id = c.start_id

    def _stack(self, n_layers: int, *, decoder: bool) -> Stack:
        blocks = [self._block(cross=decoder) for _ in range(n_layers)]
        return Stack(blocks, causal=decoder, norm=self._norm() if self.config.final_norms else None)

    def _block(self, *, cross: bool) -> Block:
        c = self.config
        n_heads, d_ff = c.n_heads, c.d_ff
        if cross:
            n_heads, d_ff = c.n_decoder_heads or n_heads, c.d_decoder_ff or d_ff
        return (PreNormBlock if c.norm_first else PostNormBlock)(
            self._attention(n_heads),
            FeedForward(c.d_model, d_ff, c.act, dropout=c.activation_dropout),
            Norms(self._norm(), self._norm(), cross=self._norm() if cross else None),
            cross=self._attention(n_heads) if cross else None,
            dropout=c.dropout,
        )

    def _attention(self, n_heads: int) -> Attention:
        return Attention(self.config.d_model, n_heads, dropout=self.config.attention_dropout)

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.config.d_model)

    def encode(self, batch: Batch) -> Tensor:
        """The encoder's output (B, S, E), the memory that the decoder attends to."""
        source, positions = self.source_positions(batch)  # (B, S), (1, S)
        x = self._embedded(self.source_embed, source, positions)  # (B, S, E)
        return self.encoder(x, positions, lengths=batch.source_lengths)  # (B, S, E)

    def decode(self, batch: Batch, memory: Tensor | None, state: KeyValueState | None = None) -> Tensor:
        """The decoder's last hidden states (B, T, E), after attending to the memory (B, S, E)."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self._embedded(self.target_embed, batch.ids, positions)  # (B, T, E)
        lengths = {"lengths": batch.lengths, "memory_lengths": batch.source_lengths}
        return self.decoder(x, positions, state=state, memory=memory, **lengths)  # (B, T, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Source (B, S) and target (B, T) -> logits (B, T, V) of the token that follows each of the target."""
        batch = as_batch(batch)
        memory = self.encode(batch)  # (B, S, E)
        hidden = self.decode(batch, memory)  # (B, T, E)
        return Output(hidden, self.head(hidden))  # (B, T, V)

    def _embedded(self, embed: Embedding, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens embedded, plus their positions (section 3.5)."""
        x = embed(tokens)  # (B, T, E)
        if self.config.pad_id is not None:  # padding's embedding gets no gradient
            x = torch.where((tokens == self.config.pad_id)[..., None], x.detach(), x)
        return self.dropout(x + self.position(positions).to(x.dtype))  # (B, T, E)

    def tie(self) -> None:
        """The head's matrix is the target's embedding, if they are tied."""
        if self.config.tied:
            self.head.weight = self.target_embed.weight

    def init_weights(self) -> None:
        """As in the authors' tensor2tensor: matrices after Glorot & Bengio (2010), embeddings N(0, 1/√d_model), which
        are multiplied by √d_model when used."""
        embeddings = [self.source_embed.weight, self.target_embed.weight, self.head.weight]
        for name, p in self.named_parameters():
            if any(p is e for e in embeddings):
                nn.init.normal_(p, std=self.config.d_model**-0.5)
            elif p.ndim == 2:
                nn.init.xavier_uniform_(p)
            else:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
        if self.config.pad_id is not None:
            for embed in self.source_embed, self.target_embed:
                nn.init.zeros_(embed.weight.data[self.config.pad_id])


# --- the hub's names -------------------------------------------------------------------------------------------------

# What a missing key means in Marian's config.json, where it is not our default.
MARIAN: Mapping[str, Any] = {
    "d_model": 1024, "n_layers": 12, "n_decoder_layers": 12, "n_heads": 16, "n_decoder_heads": 16, "d_ff": 4096,
    "d_decoder_ff": 4096, "vocab_size": 58101,
    "max_len": 1024, "act": "gelu", "scale_embedding": False, "start_id": 58100, "pad_id": 58100,
}  # fmt: skip
# The decoder's or target's settings, which are None where they are the encoder's or source's.
SAME: Mapping[str, str] = {
    "n_decoder_layers": "n_layers",
    "n_decoder_heads": "n_heads",
    "d_decoder_ff": "d_ff",
    "target_vocab_size": "vocab_size",
}


class MarianLayout(HubLayout):
    """`marian` on the hub, the only layout there for a Transformer of 2017."""

    names: Mapping[str, str] = {
        **{name: name for name in ("d_model", "vocab_size", "scale_embedding", "dropout", "attention_dropout")},
        "activation_dropout": "activation_dropout",
        "n_layers": "encoder_layers",
        "n_decoder_layers": "decoder_layers",
        "n_heads": "encoder_attention_heads",
        "n_decoder_heads": "decoder_attention_heads",
        "d_ff": "encoder_ffn_dim",
        "d_decoder_ff": "decoder_ffn_dim",
        "target_vocab_size": "decoder_vocab_size",
        "max_len": "max_position_embeddings",
        "shared": "share_encoder_decoder_embeddings",
        "tied": "tie_word_embeddings",
        "act": "activation_function",
        "start_id": "decoder_start_token_id",
        "pad_id": "pad_token_id",
    }
    fixed: Mapping[str, Any] = {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        **dict.fromkeys(("is_encoder_decoder", "static_position_embeddings"), True),
        **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm"), False),
    }
    written: Mapping[str, Any] = dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0)

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, with Marian's defaults."""
        read = {**MARIAN, **super().read(hub), "positions": "halves", "head_bias": True}
        if read.get("shared", True) and not read.get("tied", True):
            raise ValueError("a marian with shared embeddings and tie_word_embeddings false is not supported")
        for ours, encoders in SAME.items():
            read[ours] = None if read.get(ours) == read[encoders] else read.get(ours)  # None: the same
        return read

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Marian's config.json; ValueError for a model that its layout has no place for."""
        if not is_marian(config):
            raise ValueError("Marian's layout, the hub's only one for this model, has no place for its settings")
        return super().write(config) | {
            self.names[ours]: getattr(config, ours) or getattr(config, encoders) for ours, encoders in SAME.items()
        }

    def equivalent(self, model: Transformer, pad_id: int | None) -> Transformer:
        """The model with all sines before all cosines, as Marian has them: the same dimensions in another order, which
        embeddings, norms and products follow. Its bias of the logits is 0."""
        c = model.config
        config = c.replace(positions="halves", head_bias=True, pad_id=pad_id if c.pad_id is None else c.pad_id)
        if is_marian(c) or c.d_model % 2 or not is_marian(config):
            return model
        order = torch.arange(c.d_model, device=model.device)
        if c.positions == "interleaved":
            order = order.view(-1, 2).t().flatten()
        with torch.device("meta"):
            new = Transformer(config)
        old = dict(model.named_parameters())
        new.to(next(model.parameters()).dtype).to_empty(device=model.device).train(model.training).tie()
        with torch.no_grad():
            for name, p in new.named_parameters():
                p.copy_(_reordered(name, old[name], order) if name in old else torch.zeros_like(p))
        new.special, new.generation = dict(model.special), dict(model.generation)
        return new

    def weight_map(self, model: Transformer) -> WeightMap:
        """Marian's names; our own for a model that its layout has no place for."""
        c = model.config
        if not is_marian(c):
            return identity(dict(model.named_parameters()))
        rules = [
            rule("source_embed", "model.shared" if c.shared else "model.encoder.embed_tokens"),
            rule("target_embed", "model.decoder.embed_tokens"),
            rule("head.weight", "lm_head.weight", tensor=True),
            rule("head.bias", "final_logits_bias", Reshape(1, c.n_target), tensor=True),
            *_block_rules("encoder"),
            *_block_rules("decoder"),
        ]
        ignored = [r"\.embed_positions\.weight$"]
        ignored += [r"coder\.embed_tokens\.weight$"] if c.shared else []
        ignored += [r"^lm_head\.weight$"] if c.tied else []
        return WeightMap(rules, prefix="model.", ignored=ignored)


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """A parameter with its dimensions of the model's width in another order: the outputs of a sublayer, the inputs of
    other matrices, and all of a norm."""
    if name.endswith(("output.weight", "output.bias", "down.weight", "down.bias")) or "norm" in name:
        return tensor[order]
    return tensor[:, order] if tensor.ndim == 2 else tensor


def _block_rules(stack: str) -> list[Rule]:
    """The rules for the blocks of the encoder or the decoder."""
    ours, theirs = f"{stack}.blocks.{{}}.", f"model.{stack}.layers.{{}}."
    rules = [
        rule(ours + "attention_norm", theirs + "self_attn_layer_norm"),
        rule(ours + "cross_norm", theirs + "encoder_attn_layer_norm"),
        rule(ours + "feedforward_norm", theirs + "final_layer_norm"),
        rule(ours + "feedforward.up", theirs + "fc1"),
        rule(ours + "feedforward.down", theirs + "fc2"),
    ]
    for mine, hubs in ("attention", "self_attn"), ("cross", "encoder_attn"):
        for part, short in ("query", "q"), ("key", "k"), ("value", "v"), ("output", "out"):
            rules.append(rule(f"{ours}{mine}.{part}", f"{theirs}{hubs}.{short}_proj"))
    return rules


def is_marian(c: TransformerConfig) -> bool:
    """Whether Marian's layout has a place for these settings; there, untied means that all three tables differ."""
    plain = not (c.norm_first or c.final_norms) and c.positions == "halves"
    return plain and c.head_bias and c.max_len is not None and (c.tied or not c.shared)


TransformerConfig.hub = MarianLayout(TransformerConfig)
