"""T5 (Raffel et al. 2020), T5 v1.1 (Shazeer 2020), FLAN-T5 (Chung et al. 2022) and ByT5 (Xue et al. 2022).

A pre-norm encoder-decoder with RMSNorm and no biases in its layers. In place of positions, attention scores get a
trained bias for each bucket of relative distance; the encoder and the decoder have one table each. Scores are not
divided by √d_head: the initial queries are smaller instead. T5's head is tied to the embedding, and its input is
divided by √d_model; from v1.1 on the head is a matrix of its own and the feed-forward is gated. ByT5 reads bytes, and
its encoder is three times as deep as its decoder.

Where we differ: the reference clamps fp16 overflows after every sublayer. T5 was trained in bfloat16; use that.

    B batch, T target, S source, E model width, V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, EncoderDecoderModel, Output, as_batch
from heedful.models.config import Config
from heedful.models.hub import HubLayout
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
    """T5's settings; the defaults are those of T5 small."""

    d_model: int = 512
    n_layers: int = 6
    n_decoder_layers: int | None = None  # n_layers unless given
    n_heads: int = 8
    d_head: int = 64  # n_heads x d_head need not be d_model
    d_ff: int = 2048
    vocab_size: int = 32128
    n_buckets: int = 32  # of relative distances
    max_distance: int = 128  # greater distances share the last bucket
    act: str = "relu"
    gated: bool = False  # the feed-forward, from v1.1 on
    tied: bool = True  # the head's matrix is the embedding
    scaled: bool | None = None  # the head's input, by 1/√d_model; None: where it is tied
    norm_eps: float = 1e-6
    dropout: float = 0.1
    start_id: int = 0  # the target begins with padding
    encoder_only: bool = False  # without decoder and head: a T5EncoderModel, for embeddings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_buckets % 4 or self.max_distance <= self.n_buckets // 2:
            raise ValueError(
                f"{self.n_buckets} buckets up to distance {self.max_distance}: buckets come in fours, "
                "and the distance is more than half of them"
            )
        if not 0 <= self.start_id < self.vocab_size:
            raise ValueError(f"start_id is {self.start_id}, and the vocabulary has {self.vocab_size} tokens")

    @property
    def scales_head(self) -> bool:
        """Whether the head's input is scaled."""
        return self.tied if self.scaled is None else self.scaled


class T5(EncoderDecoderModel):
    """One embedding for source and target, an encoder and a decoder with relative position biases, the head."""

    family = "t5"
    config_class = T5Config
    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = self._stack(c.n_layers, decoder=False)
        self.start_id = c.start_id
        if c.encoder_only:
            self.abilities = ("embed", "neighbours", "capture")
            return
        self.decoder = self._stack(c.n_decoder_layers or c.n_layers, decoder=True)
        self.head = LanguageHead(
            c.d_model,
            c.vocab_size,
            tied=self.embed.weight if c.tied else None,
            scale=c.d_model**-0.5 if c.scales_head else None,
        )

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
        """The encoder's output (B, S, E), the memory that the decoder attends to."""
        source, positions = self.source_positions(batch)  # (B, S), (1, S)
        x = self.dropout(self.embed(source))  # (B, S, E)
        return self.dropout(self.encoder(x, positions, lengths=batch.source_lengths))  # (B, S, E)

    def decode(self, batch: Batch, memory: Tensor | None, state: KeyValueState | None = None) -> Tensor:
        """The decoder's last hidden states (B, T, E), after attending to the memory (B, S, E)."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids))  # (B, T, E)
        lengths = {"lengths": batch.lengths, "memory_lengths": batch.source_lengths}
        return self.dropout(self.decoder(x, positions, state=state, memory=memory, **lengths))  # (B, T, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Source (B, S) and target (B, T) -> logits (B, T, V) of the token that follows each of the target; of an
        encoder alone the source's hidden states (B, S, E)."""
        batch = as_batch(batch)
        memory = self.encode(batch)  # (B, S, E)
        if self.config.encoder_only:
            return Output(memory)
        hidden = self.decode(batch, memory)  # (B, T, E)
        return Output(hidden, self.head(hidden))  # (B, T, V)

    def tie(self) -> None:
        """The head's matrix is the embedding, if they are tied."""
        if self.config.tied and not self.config.encoder_only:
            self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        """As in mesh-tensorflow: each matrix N(0, 1/√inputs), queries smaller by 1/√d_head, embeddings N(0, 1)."""
        c = self.config
        inputs = {"output": c.n_heads * c.d_head, "down": c.d_ff, "query": c.d_model * c.d_head}
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.ones_(p)
            elif p is self.embed.weight:
                nn.init.normal_(p, std=1.0)
            else:
                nn.init.normal_(p, std=inputs.get(name.split(".")[-2], c.d_model) ** -0.5)


# --- the hub's names -------------------------------------------------------------------------------------------------


class T5Layout(HubLayout):
    """`t5` on the hub."""

    names: Mapping[str, str] = {
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
    fixed: Mapping[str, Any] = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
    }
    written: Mapping[str, Any] = {"is_encoder_decoder": True}

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, the feed-forward's kind, and whether the head is tied."""
        # "gated-gelu" means the tanh form, whatever "gelu" means elsewhere.
        kind = hub.get("feed_forward_proj", "relu")
        act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        # Newer files of untied models have tie_word_embeddings true all the same, and scale_decoder_outputs false.
        tied = hub.get("tie_word_embeddings", True) and hub.get("scale_decoder_outputs", True)
        encoder_only = (hub.get("architectures") or [""])[0] == "T5EncoderModel"
        if not hub.get("is_encoder_decoder", True) and not encoder_only:
            raise ValueError("a t5 with is_encoder_decoder False is not supported, unless it is a T5EncoderModel")
        read = super().read(hub)
        if read.get("n_decoder_layers") == read.get("n_layers", T5Config.n_layers):
            read["n_decoder_layers"] = None
        return read | {
            "act": hub.get("dense_act_fn") or act,
            "gated": hub.get("is_gated_act", kind.startswith("gated-")),
            "tied": tied,
            "encoder_only": encoder_only,
        }

    def write(self, config: T5Config) -> dict[str, Any]:
        """The settings in `names`, the feed-forward's kind, and whether the head is tied."""
        act = "gelu" if config.gated and config.act == "gelu_new" else config.act
        return super().write(config) | {
            "num_decoder_layers": config.n_decoder_layers or config.n_layers,
            "feed_forward_proj": f"gated-{act}" if config.gated else act,
            "dense_act_fn": config.act,
            "is_gated_act": config.gated,
            "tie_word_embeddings": config.tied,
            "scale_decoder_outputs": config.scales_head,
            **({"architectures": ["T5EncoderModel"], "is_encoder_decoder": False} if config.encoder_only else {}),
        }

    def fit(self, config: T5Config, tensors: Collection[str]) -> T5Config:
        """transformers 5 makes new models tied and, from v1.1 on, not scaled; config.json is that of an untied one."""
        if not any(name.startswith("decoder.") for name in tensors):
            return dataclasses.replace(config, encoder_only=True)
        if config.tied or config.encoder_only or "lm_head.weight" in tensors:
            return config
        return dataclasses.replace(config, tied=True, scaled=False)

    def weight_map(self, model: T5) -> WeightMap:
        """Blocks are lists of numbered sublayers; the table of position biases is in the first."""
        rules = [rule("embed", "shared"), rule("head", "lm_head")]
        ignored = [
            r"^(en|de)coder\.embed_tokens\.weight$",
            r"EncDecAttention\.relative_attention_bias\.weight$",
        ]
        if model.config.tied or model.config.encoder_only:
            ignored.append(r"^lm_head\.weight$")
        if model.config.encoder_only:
            ignored.append(r"^decoder\.")
        stacks = _stack_rules("encoder", 1, model.config.gated) + _stack_rules("decoder", 2, model.config.gated)
        return WeightMap(rules + stacks, ignored=ignored)


def _stack_rules(stack: str, last: int, gated: bool) -> list[Rule]:
    """The rules for the encoder or the decoder, whose `last` sublayer is the feed-forward."""
    ours, theirs = f"{stack}.blocks.{{}}.", f"{stack}.block.{{}}.layer."
    feedforward = f"{theirs}{last}.DenseReluDense."
    rules = [
        rule(f"{stack}.bias", f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        rule(f"{stack}.norm", f"{stack}.final_layer_norm"),
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


T5Config.hub = T5Layout(T5Config)
