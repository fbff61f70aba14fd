"""What BERT, RoBERTa and DistilBERT share: one bidirectional encoder, and the heads that read it (BERT, section 3).

    head            reads               logits
    encoder         -                   none: the hidden states alone
    pooler          [CLS]               none: extra["pooled"] (B, E)
    masked          every position      (B, T, V)
    pretraining     both                (B, T, V), and extra["next_sentence"] (B, 2)
    next_sentence   [CLS]               (B, 2)
    classify        [CLS]               (B, L)
    choose          [CLS] per choice    (B, C); tokens and segments are (B, C, T), lengths (B, C)
    tag             every position      (B, T, L)
    answer          every position      (B, T, 2): does the answer begin here, does it end here

Each layer normalizes after its sums, as the original Transformer did, and the sum of the embeddings is normalized too.

    B batch, T positions, E model width, V vocabulary, L labels, C choices
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, Model, Output, as_batch
from heedful.models.config import HeadConfig
from heedful.models.mapping import Rule, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import MaskedHead, Pooler
from heedful.nn.mask import positions_in_documents
from heedful.nn.position import Learned
from heedful.nn.stack import Stack, places

ABILITIES = {
    "masked": "fill",
    "pretraining": "fill",
    "classify": "classify",
    "tag": "tag",
    "answer": "answer",
}
POOLED = ("next_sentence", "classify", "choose")  # heads that read one vector per sequence


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
    """Embeds tokens, segments and positions, encodes, and lets one head speak."""

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
        self.abilities = ("embed", *([ABILITIES[c.head]] if c.head in ABILITIES else []), "capture")
        self.pooler = pooler
        self.head_dropout = nn.Dropout(head_dropout)
        self.head: nn.Module | None = None
        self.next_sentence = nn.Linear(c.d_model, 2) if c.head == "pretraining" else None
        if c.head in ("masked", "pretraining"):
            self.head = MaskedHead(c.d_model, c.vocab_size, act, norm_eps, tied=self.embed.weight)
        elif c.head not in ("encoder", "pooler"):
            n_out = {"next_sentence": 2, "answer": 2, "choose": 1}.get(c.head, c.n_labels)
            self.head = nn.Linear(c.d_model, n_out)

    @staticmethod
    def _block(c: EncoderConfig, act: str, eps: float) -> Block:
        return Block(
            Attention(c.d_model, c.n_heads, dropout=c.attention_dropout),
            FeedForward(c.d_model, c.d_ff, act),
            Norms(nn.LayerNorm(c.d_model, eps), nn.LayerNorm(c.d_model, eps)),
            "post",
            dropout=c.dropout,
        )

    @property
    def longest(self) -> int:
        return self.config.max_len

    def tie(self) -> None:
        if isinstance(self.head, MaskedHead):
            self.head.vocabulary.weight = self.embed.weight

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E), before the head."""
        tokens, lengths, documents = batch.ids, batch.lengths, batch.documents
        n, device = tokens.shape[1], tokens.device
        self.check_length(n)
        positions = places(0, n, device)
        if documents is not None:
            positions = positions_in_documents(documents)
            if lengths is not None:  # padding becomes a document of its own, so that every query sees something
                documents = documents.masked_fill(places(0, n, device) >= lengths[:, None], -1)
                lengths = None
        x = self.embed(tokens) + self._segments(batch.segments) + self.position(positions)  # (B, T, E)
        x = self.dropout(self.embed_norm(x))
        return self.encoder(x, positions, lengths=lengths, documents=documents)

    def _segments(self, segments: Tensor | None) -> Tensor | float:
        """What tells sentence A from B, (B, T, E); without `segments` everything is A."""
        n_segments = 0 if self.segment is None else len(self.segment.weight)
        if segments is not None and n_segments < 2:
            raise ValueError("this model does not tell sentence A from sentence B: give it no segments")
        if self.segment is None:
            return 0.0
        return self.segment.weight[0] if segments is None else self.segment(segments)

    def forward(self, batch: Batch | Tensor) -> Output:
        batch = as_batch(batch)
        if self.config.head == "choose":
            return self._choose(batch)
        if self.pooler is not None and batch.documents is not None:
            raise ValueError(f"the head {self.config.head!r} reads one vector per row: do not pack documents")
        hidden = self.hidden(batch)
        output = Output(hidden)
        if self.pooler is not None:
            output.extra["pooled"] = self.pooler(hidden)
        if self.next_sentence is not None:
            output.extra["next_sentence"] = self.next_sentence(output.extra["pooled"])
        if self.head is not None:
            read = output.extra["pooled"] if self.config.head in POOLED else hidden
            output.logits = self.head(self.head_dropout(read))
        return output

    def _choose(self, batch: Batch) -> Output:
        """Every choice is a sequence of its own; their scores are laid side by side (BERT, section 4.4)."""
        if batch.ids.ndim != 3 or batch.documents is not None:
            raise ValueError("the head 'choose' reads tokens (batch, choices, positions), not packed")
        assert self.pooler is not None and self.head is not None
        flat = {
            name: None if (given := getattr(batch, name)) is None else given.flatten(0, 1)
            for name in ("tokens", "lengths", "segments")
        }
        hidden = self.hidden(dataclasses.replace(batch, **flat))  # (B·C, T, E)
        pooled = self.pooler(hidden)
        logits = self.head(self.head_dropout(pooled))  # (B·C, 1)
        rows = batch.ids.shape[:2]
        return Output(hidden.unflatten(0, rows), logits.view(rows), {"pooled": pooled.unflatten(0, rows)})

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
