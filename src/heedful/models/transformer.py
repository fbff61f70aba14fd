"""The original Transformer (Vaswani et al. 2017), and Marian's translators on the hub, which have its shape.

An encoder reads the source, a decoder writes the target and looks back at it. Each sublayer is norm(x + f(x)); one
matrix serves both embeddings and, transposed, the output (section 3.4). What varies here is what later became
habit: norms first, a last norm on each half (torch.nn.Transformer has both), separate vocabularies.

Marian's models (OPUS-MT, Tiedemann & Thottingal 2020) put all sines before all cosines, add a bias to the logits
that stays as it came, and begin the target with padding, whose embedding is zero and stays so.

Table 3's variation (B), keys smaller than values, is not here, nor (E), learned positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, EncoderDecoderModel, Output, as_batch
from heedful.models.config import Config
from heedful.models.mapping import Reshape, Rule, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PostNormBlock, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.position import Layout, Sinusoidal
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState

# What a key that is missing in Marian's config.json means there, where it is not our default.
MARIAN: Mapping[str, Any] = {
    "d_model": 1024,
    "n_layers": 12,
    "n_decoder_layers": 12,
    "n_heads": 16,
    "d_ff": 4096,
    "vocab_size": 58101,
    "max_len": 1024,
    "act": "gelu",
    "scale_embedding": False,
    "start_id": 58100,
    "pad_id": 58100,
}


@dataclass(frozen=True)
class TransformerConfig(Config):
    d_model: int = 512
    n_layers: int = 6
    n_decoder_layers: int | None = None  # as the encoder unless given
    n_heads: int = 8
    d_ff: int = 2048
    vocab_size: int = 37000
    target_vocab_size: int | None = None  # where source and target have vocabularies of their own
    max_len: int | None = None  # sinusoids have no end; Marian's tables do
    shared: bool = True  # source and target have one embedding
    tied: bool = True  # the target's embedding is the output matrix too
    norm_first: bool = False
    final_norms: bool = False  # one more norm at the end of each half
    positions: Layout = "interleaved"
    scale_embedding: bool = True  # by √d_model
    head_bias: bool = False  # added to the logits, not trained (Marian)
    act: str = "relu"
    dropout: float = 0.1  # of the embeddings' sum and of every sublayer (section 5.4)
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    start_id: int = 0  # what the target begins with
    pad_id: int | None = None  # a token whose embedding is not trained (Marian)

    hub_names: ClassVar[Mapping[str, str]] = {
        "d_model": "d_model",
        "n_layers": "encoder_layers",
        "n_decoder_layers": "decoder_layers",
        "n_heads": "encoder_attention_heads",
        "d_ff": "encoder_ffn_dim",
        "vocab_size": "vocab_size",
        "target_vocab_size": "decoder_vocab_size",
        "max_len": "max_position_embeddings",
        "shared": "share_encoder_decoder_embeddings",
        "tied": "tie_word_embeddings",
        "scale_embedding": "scale_embedding",
        "act": "activation_function",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation_dropout": "activation_dropout",
        "start_id": "decoder_start_token_id",
        "pad_id": "pad_token_id",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
    }

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
        return self.target_vocab_size or self.vocab_size

    @property
    def is_marian(self) -> bool:
        """Whether Marian's layout on the hub has a place for these settings; there, untied unties all three tables."""
        plain = not (self.norm_first or self.final_norms) and self.positions == "halves"
        return plain and self.head_bias and self.max_len is not None and (self.tied or not self.shared)

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        for what in "attention_heads", "ffn_dim":
            encoder, decoder = f"encoder_{what}", f"decoder_{what}"
            if hub.get(encoder) != hub.get(decoder):
                raise ValueError(
                    f"a marian whose {decoder} {hub.get(decoder)} is not its {encoder} {hub.get(encoder)} "
                    "is not supported"
                )
        read = {**MARIAN, **super().read_hub(hub), "positions": "halves", "head_bias": True}
        if read.get("shared", True) and not read.get("tied", True):
            raise ValueError("a marian with shared embeddings and tie_word_embeddings false is not supported")
        for ours, same in ("n_decoder_layers", "n_layers"), ("target_vocab_size", "vocab_size"):
            read[ours] = None if read.get(ours) == read[same] else read.get(ours)  # None: the same
        return read

    def to_hub(self) -> dict[str, Any]:
        if not self.is_marian:
            raise ValueError("Marian's layout, the hub's only one for this model, has no place for its settings")
        return super().to_hub() | {
            "decoder_layers": self.n_decoder_layers or self.n_layers,
            "decoder_attention_heads": self.n_heads,
            "decoder_ffn_dim": self.d_ff,
            "decoder_vocab_size": self.n_target,
        }


class Transformer(EncoderDecoderModel):
    family = "transformer"
    config_class = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        c = config
        scale = math.sqrt(c.d_model) if c.scale_embedding else None
        self.source_embed = Embedding(c.vocab_size, c.d_model, scale=scale)
        self.target_embed = self.source_embed
        if not c.shared:
            self.target_embed = Embedding(c.n_target, c.d_model, scale=scale)
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
        return (PreNormBlock if c.norm_first else PostNormBlock)(
            self._attention(),
            FeedForward(c.d_model, c.d_ff, c.act, dropout=c.activation_dropout),
            Norms(self._norm(), self._norm(), cross=self._norm() if cross else None),
            cross=self._attention() if cross else None,
            dropout=c.dropout,
        )

    def _attention(self) -> Attention:
        return Attention(self.config.d_model, self.config.n_heads, dropout=self.config.attention_dropout)

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.config.d_model)

    @property
    def context_length(self) -> int | None:
        return self.config.max_len

    def encode(self, batch: Batch) -> Tensor:
        """The source embedded, with its positions, through the encoder: (B, S, E)."""
        source, positions = self.source_positions(batch)
        x = self._embedded(self.source_embed, source, positions)
        return self.encoder(x, positions, lengths=batch.source_lengths)

    def decode(self, batch: Batch, memory: Tensor | None, state: KeyValueState | None = None) -> Tensor:
        """The target embedded, with its positions, through the decoder, which attends to the memory: (B, T, E)."""
        positions = self.positions(batch, state)
        x = self._embedded(self.target_embed, batch.ids, positions)
        lengths = {"lengths": batch.lengths, "memory_lengths": batch.source_lengths}
        return self.decoder(x, positions, state=state, memory=memory, **lengths)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Logits (B, T, V) of what follows each token of the target."""
        batch = as_batch(batch)
        hidden = self.decode(batch, self.encode(batch))
        return Output(hidden, self.head(hidden))

    def _embedded(self, embed: Embedding, tokens: Tensor, positions: Tensor) -> Tensor:
        x = embed(tokens)
        if self.config.pad_id is not None:  # padding's embedding gets no gradient
            x = torch.where((tokens == self.config.pad_id)[..., None], x.detach(), x)
        return self.dropout(x + self.position(positions).to(x.dtype))  # (B, T, E)

    def tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.target_embed.weight

    def init_weights(self) -> None:
        """Matrices after Glorot & Bengio (2010), as the authors' tensor2tensor; embeddings N(0, 1/√d_model), which
        their scale brings to 1."""
        embeddings = [self.source_embed.weight, self.target_embed.weight, self.head.weight]
        for name, p in self.named_parameters():
            if any(p is e for e in embeddings):
                nn.init.normal_(p, std=self.config.d_model**-0.5)
            elif p.ndim == 2:
                nn.init.xavier_uniform_(p)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
            else:
                nn.init.ones_(p)
        if self.config.pad_id is not None:
            for embed in self.source_embed, self.target_embed:
                nn.init.zeros_(embed.weight.data[self.config.pad_id])

    def weight_map(self) -> WeightMap:
        c = self.config
        if not c.is_marian:
            return super().weight_map()
        rules = [
            rule("head.weight", "lm_head.weight", tensor=True),
            rule("head.bias", "final_logits_bias", Reshape(1, c.n_target), tensor=True),
        ]
        if c.shared:
            rules.append(rule("source_embed", "model.shared"))
        else:
            rules.append(rule("source_embed", "model.encoder.embed_tokens"))
            rules.append(rule("target_embed", "model.decoder.embed_tokens"))
        ignored = [r"\.embed_positions\.weight$"]
        ignored += [r"coder\.embed_tokens\.weight$"] if c.shared else []
        ignored += [r"^lm_head\.weight$"] if c.tied else []
        return WeightMap([*rules, *_layers("encoder"), *_layers("decoder")], prefix="model.", ignored=ignored)


def _layers(half: str) -> list[Rule]:
    """Marian's names of an encoder's or a decoder's layers."""
    ours, theirs = f"{half}.blocks.{{}}.", f"model.{half}.layers.{{}}."
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
