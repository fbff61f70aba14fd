"""What BERT, RoBERTa and DistilBERT share: a bidirectional encoder with one of the heads of models/heads.py.

Each layer normalizes after its sums, as the original Transformer did, and the sum of the embeddings is normalized too.

    B batch, T positions, E model width, C choices
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, Model, Output, as_batch
from heedful.models.config import HeadConfig
from heedful.models.heads import HEADS, HeadParts, MaskedHead
from heedful.models.hub import HeadLayout
from heedful.models.mapping import Rule, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PostNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import Pooler
from heedful.nn.mask import positions_in_documents
from heedful.nn.position import Learned
from heedful.nn.stack import Stack, position_ids


@dataclass(frozen=True)
class EncoderConfig(HeadConfig):
    """The settings that all three have; the defaults are those of BERT base."""

    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    d_ff: int = 3072
    vocab_size: int = 30522
    max_len: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.1
    null_threshold: float | None = None  # head "answer": no answer if its log-odds are above this; None: always one


class EncoderModel(Model):
    """Embeddings, encoder and head; a family embeds its inputs in `hidden`."""

    config: EncoderConfig

    def __init__(
        self,
        config: EncoderConfig,
        *,
        position: Learned,
        segment: Embedding | None,
        pooler: Pooler | None,
        act: str,
        norm_eps: float,
        head_dropout: float,
        head_act: str | None = None,
    ) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.position, self.segment = position, segment
        self.embed_norm = nn.LayerNorm(c.d_model, norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = Stack([self._block(c, act, norm_eps) for _ in range(c.n_layers)], causal=False)
        parts = HeadParts(c.d_model, c.n_labels, self.embed.weight, head_act or act, norm_eps, head_dropout, pooler)
        self.head = HEADS[c.head](parts)
        self.abilities = ("embed", *([self.head.ability] if self.head.ability else []), "neighbours", "capture")

    @staticmethod
    def _block(c: EncoderConfig, act: str, eps: float) -> Block:
        return PostNormBlock(
            Attention(c.d_model, c.n_heads, dropout=c.attention_dropout),
            FeedForward(c.d_model, c.d_ff, act),
            Norms(nn.LayerNorm(c.d_model, eps), nn.LayerNorm(c.d_model, eps)),
            dropout=c.dropout,
        )

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E), before the head."""
        raise NotImplementedError

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T), or (B, C, T) of choices -> the last hidden states and the head's logits."""
        batch = as_batch(batch)
        self.head.check(batch)
        hidden = self.hidden(batch.flattened())  # (B, T, E) or (B·C, T, E)
        return self.head.output(hidden.unflatten(0, batch.ids.shape[:-1]))  # (B, T, E) or (B, C, T, E)

    def encode(self, x: Tensor, batch: Batch) -> Tensor:
        """The sum of the embeddings (B, T, E), normalized, through the encoder's blocks -> (B, T, E)."""
        x = self.dropout(self.embed_norm(x))  # (B, T, E)
        columns = position_ids(0, x.shape[1], x.device)  # (1, T)
        lengths, documents = batch.lengths, batch.documents
        if documents is not None and lengths is not None:
            # Padding becomes a document of its own, so that every query has a key to attend to.
            documents, lengths = documents.masked_fill(columns >= lengths[:, None], -1), None
        return self.encoder(x, columns, lengths=lengths, documents=documents)  # (B, T, E)

    def positions(self, batch: Batch) -> Tensor:
        """The position of each token (B or 1, T), from 0 in each packed document; ValueError if there are too many."""
        n = batch.ids.shape[1]
        self.check_length(n)
        if batch.documents is not None:
            return positions_in_documents(batch.documents)
        return position_ids(0, n, batch.ids.device)

    def embed_segments(self, segments: Tensor | None) -> Tensor:
        """The embeddings of segments (B, T) -> (B, T, E); without `segments`, that of sentence A (E,)."""
        assert self.segment is not None
        if segments is None:
            return self.segment.weight[0]
        if len(self.segment.weight) < 2:
            raise ValueError("this model does not tell sentence A from sentence B: give it no segments")
        return self.segment(segments)

    @property
    def context_length(self) -> int:
        """The number of learned positions."""
        return self.config.max_len

    def tie(self) -> None:
        """The masked head's matrix is the embedding."""
        if isinstance(self.head, MaskedHead):
            self.head.vocabulary.weight = self.embed.weight


# --- the hub's names -------------------------------------------------------------------------------------------------


NULL_THRESHOLD = "null_score_diff_threshold"  # as transformers' script for SQuAD 2 calls it


class EncoderLayout(HeadLayout):
    """The layout of BERT's relatives: an encoder whose tensors have the prefix `base` unless it stands alone."""

    base: str  # as in "bert."
    head_modules: Sequence[str]  # all modules of all heads, by the hub's names
    tied: str  # regular expression: the masked head's copy of the embedding

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, head and labels; pruned heads are refused."""
        if hub.get("pruned_heads"):
            raise ValueError("a model with pruned_heads is not supported")
        return super().read(hub) | {"null_threshold": hub.get(NULL_THRESHOLD)}

    def write(self, config: Any) -> dict[str, Any]:
        """The settings in `names`, head and labels; the threshold of a model that may say that there is no answer."""
        told = {} if config.null_threshold is None else {NULL_THRESHOLD: config.null_threshold}
        return super().write(config) | told

    def rules(self, config: Any, base: str) -> list[Rule]:
        """The rules for the encoder, whose names begin with `base`, and its head."""
        raise NotImplementedError

    def weight_map(self, model: EncoderModel) -> WeightMap:
        """The `rules`; tensors of heads that this model does not have are ignored."""
        alone = model.config.head == "encoder" or self.heads[next(iter(self.heads))] == model.config.head
        rules = self.rules(model.config, "" if alone else self.base)
        entries = WeightMap(rules).entries(dict(model.named_parameters()))
        used = [name.removeprefix(self.base) for entry in entries for name in entry.theirs]
        spare = [m for m in self.head_modules if not any(name.startswith(m + ".") for name in used)]
        others = [f"^({self.base})?{m}.".replace(".", r"\.") for m in spare]
        # The oldest files call a norm's weight and bias gamma and beta, as TensorFlow did.
        renamed = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
        return WeightMap(rules, self.base, [r"embeddings\.position_ids$", *others, self.tied], renamed)


def bert_rules(base: str) -> list[Rule]:
    """The rules for BERT's encoder, which are RoBERTa's too."""
    ours, theirs = "encoder.blocks.{}.", base + "encoder.layer.{}."
    return [
        rule("embed", base + "embeddings.word_embeddings"),
        rule("position", base + "embeddings.position_embeddings"),
        rule("segment", base + "embeddings.token_type_embeddings"),
        rule("embed_norm", base + "embeddings.LayerNorm"),
        rule(ours + "attention.query", theirs + "attention.self.query"),
        rule(ours + "attention.key", theirs + "attention.self.key"),
        rule(ours + "attention.value", theirs + "attention.self.value"),
        rule(ours + "attention.output", theirs + "attention.output.dense"),
        rule(ours + "attention_norm", theirs + "attention.output.LayerNorm"),
        rule(ours + "feedforward.up", theirs + "intermediate.dense"),
        rule(ours + "feedforward.down", theirs + "output.dense"),
        rule(ours + "feedforward_norm", theirs + "output.LayerNorm"),
    ]


def has_segments(model: Model) -> bool:
    """Whether the model has segment embeddings for sentence A and B; DistilBERT and RoBERTa have none."""
    segment = getattr(model, "segment", None)
    return segment is not None and len(segment.weight) > 1
