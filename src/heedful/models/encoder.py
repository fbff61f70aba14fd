"""What BERT, RoBERTa and DistilBERT share: a bidirectional encoder under one of the heads of models/heads.py.

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
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    d_ff: int = 3072
    vocab_size: int = 30522
    max_len: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.1

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        if hub.get("pruned_heads"):
            raise ValueError("a model with pruned_heads is not supported")
        return super().read_hub(hub)


class EncoderModel(Model):
    """Embeddings, encoder and head; a family says in `hidden` what it embeds."""

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
    ) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.position, self.segment = position, segment
        self.embed_norm = nn.LayerNorm(c.d_model, norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = Stack([self._block(c, act, norm_eps) for _ in range(c.n_layers)], causal=False)
        parts = HeadParts(c.d_model, c.n_labels, self.embed.weight, act, norm_eps, head_dropout, pooler)
        self.head = HEADS[c.head](parts)
        self.abilities = ("embed", *([self.head.ability] if self.head.ability else []), "capture")

    @staticmethod
    def _block(c: EncoderConfig, act: str, eps: float) -> Block:
        return PostNormBlock(
            Attention(c.d_model, c.n_heads, dropout=c.attention_dropout),
            FeedForward(c.d_model, c.d_ff, act),
            Norms(nn.LayerNorm(c.d_model, eps), nn.LayerNorm(c.d_model, eps)),
            dropout=c.dropout,
        )

    @property
    def context_length(self) -> int:
        """The longest sequence the model can read."""
        return self.config.max_len

    def tie(self) -> None:
        """The masked head's matrix is the embedding."""
        if isinstance(self.head, MaskedHead):
            self.head.vocabulary.weight = self.embed.weight

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E), before the head."""
        raise NotImplementedError

    def forward(self, batch: Batch | Tensor) -> Output:
        """What the head says of the hidden states; choices (B, C, T) are rows of their own on the way."""
        batch = as_batch(batch)
        self.head.check(batch)
        hidden = self.hidden(batch.flattened())
        return self.head.output(hidden.unflatten(0, batch.ids.shape[:-1]))

    def encode(self, x: Tensor, batch: Batch) -> Tensor:
        """The sum of embeddings x (B, T, E), normalized, through the encoder's blocks."""
        x, lengths, documents = self.dropout(self.embed_norm(x)), batch.lengths, batch.documents
        here = position_ids(0, x.shape[1], x.device)
        if documents is not None and lengths is not None:
            # Padding becomes a document of its own, so that every query has a key to attend to.
            documents, lengths = documents.masked_fill(here >= lengths[:, None], -1), None
        return self.encoder(x, here, lengths=lengths, documents=documents)

    def positions(self, batch: Batch) -> Tensor:
        """Position of each token (B or 1, T), from 0 in each packed document; checks the length."""
        n = batch.ids.shape[1]
        self.check_length(n)
        if batch.documents is not None:
            return positions_in_documents(batch.documents)
        return position_ids(0, n, batch.ids.device)

    def embed_segments(self, segments: Tensor | None) -> Tensor:
        """The vectors of sentence A and B (B, T, E); without `segments` everything is A, (E,)."""
        assert self.segment is not None
        if segments is None:
            return self.segment.weight[0]
        if len(self.segment.weight) < 2:
            raise ValueError("this model does not tell sentence A from sentence B: give it no segments")
        return self.segment(segments)

    def _map(self, rules: Sequence[Rule], base: str, heads: Sequence[str], ignored: Sequence[str]) -> WeightMap:
        """The map of `rules`; a file may also have the modules of `heads` that this model does without.

        `base` is the encoder's own prefix, which the files of bare encoders do not have.
        """
        entries = WeightMap(rules).entries(dict(self.named_parameters()))
        used = [name.removeprefix(base) for entry in entries for name in entry.theirs]
        spare = [h for h in heads if not any(name.startswith(h + ".") for name in used)]
        others = [f"^({base})?{h}.".replace(".", r"\.") for h in spare]
        # The oldest files call a norm's weight and bias gamma and beta, as TensorFlow did.
        renamed = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
        return WeightMap(rules, base, [r"embeddings\.position_ids$", *others, *ignored], renamed)


def bert_layout(base: str) -> list[Rule]:
    """The encoder in the files of BERT, which RoBERTa kept."""
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
