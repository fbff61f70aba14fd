"""T5 (Raffel et al. 2020), T5 v1.1 (Shazeer 2020), FLAN-T5 (Chung et al. 2022) and ByT5 (Xue et al. 2022).

An encoder-decoder with norms first, no biases, RMSNorm, and a trained bias for each bucket of distance, one table for
each half, in place of positions. Scores are not divided by √d: the initial queries are smaller instead. T5 has one
matrix for embeddings and output, whose input it divides by √d_model; from v1.1 on the output is a matrix of its
own and the feed-forward is gated. ByT5 reads bytes, and its encoder is three times as deep as its decoder.

The reference clamps fp16 overflows after every sublayer; we do not: T5 was trained in bfloat16, use that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from heedful.models.base import Batch, EncoderDecoderModel, Output, as_batch
from heedful.models.config import Config
from heedful.models.mapping import Rule, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.norm import RMSNorm
from heedful.nn.position import RelativeBias
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class T5Config(Config):
    d_model: int = 512
    n_layers: int = 6
    n_decoder_layers: int | None = None  # as the encoder unless given
    n_heads: int = 8
    d_head: int = 64  # n_heads x d_head need not be d_model
    d_ff: int = 2048
    vocab_size: int = 32128
    n_buckets: int = 32
    max_distance: int = 128  # from here on all distances are one
    act: str = "relu"
    gated: bool = False
    tied: bool = True  # one matrix for embeddings and output, which is then scaled by 1/√d_model
    norm_eps: float = 1e-6
    dropout: float = 0.1
    start_id: int = 0  # the target begins with padding

    hub_names: ClassVar[Mapping[str, str]] = {
        "d_model": "d_model",
        "n_layers": "num_layers",
        "n_decoder_layers": "num_decoder_layers",
        "n_heads": "num_heads",
        "d_head": "d_kv",
        "d_ff": "d_ff",
        "vocab_size": "vocab_size",
        "n_buckets": "relative_attention_num_buckets",
        "max_distance": "relative_attention_max_distance",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "dropout_rate",
        "start_id": "decoder_start_token_id",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_buckets % 4 or self.max_distance <= self.n_buckets // 2:
            raise ValueError(
                f"{self.n_buckets} buckets up to distance {self.max_distance}: buckets come in fours, "
                "and the distance is more than half of them"
            )
        if not 0 <= self.start_id < self.vocab_size:
            raise ValueError(f"start_id is {self.start_id}, and the vocabulary has {self.vocab_size} tokens")

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        # "gated-gelu" means the tanh form, whatever "gelu" means elsewhere.
        kind = hub.get("feed_forward_proj", "relu")
        act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        # Newer files of untied models say that they are tied, and tell the truth in another key.
        tied = hub.get("tie_word_embeddings", True) and hub.get("scale_decoder_outputs", True)
        read = super().read_hub(hub)
        if read.get("n_decoder_layers") == read.get("n_layers", cls.n_layers):
            read["n_decoder_layers"] = None
        return read | {
            "act": hub.get("dense_act_fn") or act,
            "gated": hub.get("is_gated_act", kind.startswith("gated-")),
            "tied": tied,
        }

    def to_hub(self) -> dict[str, Any]:
        act = "gelu" if self.gated and self.act == "gelu_new" else self.act
        return super().to_hub() | {
            "num_decoder_layers": self.n_decoder_layers or self.n_layers,
            "feed_forward_proj": f"gated-{act}" if self.gated else act,
            "dense_act_fn": self.act,
            "is_gated_act": self.gated,
            "tie_word_embeddings": self.tied,
            "scale_decoder_outputs": self.tied,
        }


class T5(EncoderDecoderModel):
    family = "t5"
    config_class = T5Config
    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = self._stack(c.n_layers, decoder=False)
        self.decoder = self._stack(c.n_decoder_layers or c.n_layers, decoder=True)
        self.head = LanguageHead(
            c.d_model,
            c.vocab_size,
            tied=self.embed.weight if c.tied else None,
            scale=c.d_model**-0.5 if c.tied else None,
        )
        self.start_id = c.start_id

    def _stack(self, n_layers: int, *, decoder: bool) -> Stack:
        c = self.config
        return Stack(
            [self._block(cross=decoder) for _ in range(n_layers)],
            causal=decoder,
            norm=RMSNorm(c.d_model, c.norm_eps),
            bias=RelativeBias(c.n_heads, n_buckets=c.n_buckets, max_distance=c.max_distance, bidirectional=not decoder),
        )

    def _block(self, *, cross: bool) -> Block:
        c = self.config
        return PreNormBlock(
            self._attention(),
            FeedForward(c.d_model, c.d_ff, c.act, gated=c.gated, bias=False, dropout=c.dropout),
            Norms(self._norm(), self._norm(), cross=self._norm() if cross else None),
            cross=self._attention() if cross else None,
            dropout=c.dropout,
        )

    def _attention(self) -> Attention:
        c = self.config
        return Attention(c.d_model, c.n_heads, d_head=c.d_head, bias=False, scale=1.0, dropout=c.dropout)

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.d_model, self.config.norm_eps)

    def encode(self, batch: Batch) -> Tensor:
        """The source embedded, through the encoder: (B, S, E)."""
        source, positions = self.source_positions(batch)
        x = self.encoder(self.dropout(self.embed(source)), positions, lengths=batch.source_lengths)
        return self.dropout(x)

    def decode(self, batch: Batch, memory: Tensor | None, state: KeyValueState | None = None) -> Tensor:
        """The target embedded, through the decoder, which attends to the memory: (B, T, E)."""
        positions = self.positions(batch, state)
        x = self.dropout(self.embed(batch.ids))
        rows = {"lengths": batch.lengths, "memory_lengths": batch.source_lengths}
        return self.dropout(self.decoder(x, positions, state=state, memory=memory, **rows))

    def forward(self, batch: Batch | Tensor) -> Output:
        """Logits (B, T, V) of what follows each token of the target."""
        batch = as_batch(batch)
        hidden = self.decode(batch, self.encode(batch))
        return Output(hidden, self.head(hidden))

    def tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        """Each matrix N(0, 1/√inputs), queries smaller by 1/√d_head, embeddings N(0, 1) (mesh-tensorflow's)."""
        c = self.config
        inputs = {"output": c.n_heads * c.d_head, "down": c.d_ff, "query": c.d_model * c.d_head}
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.ones_(p)
            elif p is self.embed.weight:
                nn.init.normal_(p, std=1.0)
            else:
                nn.init.normal_(p, std=inputs.get(name.split(".")[-2], c.d_model) ** -0.5)

    def weight_map(self) -> WeightMap:
        rules = [rule("embed", "shared"), rule("head", "lm_head")]
        ignored = [
            r"^(en|de)coder\.embed_tokens\.weight$",
            r"EncDecAttention\.relative_attention_bias\.weight$",
        ]
        if self.config.tied:
            ignored.append(r"^lm_head\.weight$")
        halves = _layers("encoder", 1, self.config.gated) + _layers("decoder", 2, self.config.gated)
        return WeightMap(rules + halves, ignored=ignored)


def _layers(half: str, last: int, gated: bool) -> list[Rule]:
    """The hub's names of an encoder or a decoder: sublayers are numbered, the feed-forward is the last."""
    ours, theirs = f"{half}.blocks.{{}}.", f"{half}.block.{{}}.layer."
    feedforward = f"{theirs}{last}.DenseReluDense."
    rules = [
        rule(f"{half}.bias", f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        rule(f"{half}.norm", f"{half}.final_layer_norm"),
        rule(ours + "attention_norm", theirs + "0.layer_norm"),
        rule(ours + "cross_norm", theirs + "1.layer_norm"),
        rule(ours + "feedforward_norm", f"{theirs}{last}.layer_norm"),
        rule(ours + "feedforward.gate", feedforward + "wi_0"),
        rule(ours + "feedforward.up", feedforward + ("wi_1" if gated else "wi")),
        rule(ours + "feedforward.down", feedforward + "wo"),
    ]
    for mine, hubs in ("attention", "0.SelfAttention"), ("cross", "1.EncDecAttention"):
        for part in "query", "key", "value", "output":
            rules.append(rule(f"{ours}{mine}.{part}", f"{theirs}{hubs}.{part[0]}"))
    return rules
