"""RoBERTa (Liu et al. 2019): BERT trained longer, on more text, by masked words alone.

What differs in the model: no next-sentence head, and one segment for A and B; positions that begin after the padding's
id (the tables of its checkpoints have 514 rows for 512 positions); a classifier that reads <s> through a dense layer of
its own. Where we differ: the reference gives padding no position wherever it stands; ours is always on the right.

    B batch, T positions, E model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from heedful.models.base import Batch
from heedful.models.encoder import EncoderConfig, EncoderLayout, EncoderModel, bert_rules
from heedful.models.heads import HEADS
from heedful.models.mapping import Rule, rule
from heedful.nn.embed import Embedding
from heedful.nn.head import Pooler
from heedful.nn.position import Learned


@dataclass(frozen=True)
class RobertaConfig(EncoderConfig):
    """RoBERTa's settings; the defaults are those of RoBERTa base but for what the comments say."""

    head: str = "masked"
    vocab_size: int = 50265
    max_len: int = 512
    pad_id: int = 1  # positions begin at the next number
    n_segments: int = 2  # 1 in the published checkpoints
    act: str = "gelu"
    norm_eps: float = 1e-12  # 1e-5 in the published checkpoints
    classifier_dropout: float | None = None  # `dropout` unless given

    heads: ClassVar[Sequence[str]] = ("encoder", "pooler", "masked", "classify", "choose", "tag", "answer")


class Roberta(EncoderModel):
    """Token, segment and position embeddings, a norm, encoder blocks, a head."""

    family = "roberta"
    config_class = RobertaConfig
    config: RobertaConfig

    def __init__(self, config: RobertaConfig) -> None:
        c = config
        dropout = c.dropout if c.classifier_dropout is None else c.classifier_dropout
        pooler = None
        if HEADS[c.head].pools:
            pooler = Pooler(c.d_model, dropout=dropout if c.head == "classify" else 0.0)
        super().__init__(
            c,
            position=Learned(c.max_len, c.d_model, offset=c.pad_id + 1),
            segment=Embedding(c.n_segments, c.d_model),
            pooler=pooler,
            act=c.act,
            head_act="gelu",  # whatever the encoder's is
            norm_eps=c.norm_eps,
            head_dropout=dropout if c.head in ("classify", "choose", "tag") else 0.0,
        )

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E): tokens, sentences and positions embedded, then the encoder."""
        positions = self.positions(batch)  # (B or 1, T)
        x = self.embed(batch.ids) + self.embed_segments(batch.segments) + self.position(positions)  # (B, T, E)
        return self.encode(x, batch)  # (B, T, E)


# --- the hub's names -------------------------------------------------------------------------------------------------


class RobertaLayout(EncoderLayout):
    """`roberta` on the hub."""

    names: Mapping[str, str] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "pad_id": "pad_token_id",
        "n_segments": "type_vocab_size",
        "act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "classifier_dropout": "classifier_dropout",
    }
    fixed: Mapping[str, Any] = {
        "model_type": "roberta",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    heads: Mapping[str, str] = {
        "RobertaModel": "pooler",
        "RobertaForMaskedLM": "masked",
        "RobertaForSequenceClassification": "classify",
        "RobertaForMultipleChoice": "choose",
        "RobertaForTokenClassification": "tag",
        "RobertaForQuestionAnswering": "answer",
    }
    base = "roberta."
    head_modules = ("pooler", "lm_head", "classifier", "qa_outputs")
    tied = r"^lm_head\.decoder\."

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """`max_position_embeddings` counts the rows of the table, ours the positions."""
        read = super().read(hub)
        return read | {"max_len": hub.get("max_position_embeddings", 512) - read.get("pad_id", 1) - 1}

    def write(self, config: RobertaConfig) -> dict[str, Any]:
        """`max_position_embeddings` counts the rows of the table, ours the positions."""
        return super().write(config) | {"max_position_embeddings": config.max_len + config.pad_id + 1}

    def rules(self, config: RobertaConfig, base: str) -> list[Rule]:
        """The encoder, and a head; the sequence classifier has its own dense layer instead of the pooler."""
        head = config.head
        last = {"classify": "classifier.out_proj", "answer": "qa_outputs"}.get(head, "classifier")
        return [
            *bert_rules(base),
            rule("head.pooler.dense", "classifier.dense" if head == "classify" else base + "pooler.dense"),
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.layer_norm"),
            rule("head.vocabulary.bias", "lm_head.bias", tensor=True),
            rule("head.classifier", last),
        ]


RobertaConfig.hub = RobertaLayout(RobertaConfig)
