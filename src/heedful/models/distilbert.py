"""DistilBERT (Sanh et al. 2019): half of BERT's layers, distilled from BERT.

No segments and no pooler; its classifier reads [CLS] through a dense layer with ReLU instead.

    B batch, T positions, E model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from heedful.models.base import Batch
from heedful.models.encoder import EncoderConfig, EncoderLayout, EncoderModel
from heedful.models.heads import HEADS
from heedful.models.mapping import Rule, rule
from heedful.nn.head import Pooler
from heedful.nn.position import Learned

NORM_EPS = 1e-12  # config.json has no key for it


@dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """DistilBERT's settings; the defaults are those of DistilBERT base."""

    head: str = "masked"
    n_layers: int = 6
    act: str = "gelu"
    classifier_dropout: float = 0.2
    answer_dropout: float = 0.1

    heads: ClassVar[Sequence[str]] = ("encoder", "masked", "classify", "choose", "tag", "answer")


class DistilBert(EncoderModel):
    """Token and position embeddings, a norm, encoder blocks, a head."""

    family = "distilbert"
    config_class = DistilBertConfig
    config: DistilBertConfig

    def __init__(self, config: DistilBertConfig) -> None:
        c = config
        dropout = {
            "classify": c.classifier_dropout,
            "choose": c.classifier_dropout,
            "tag": c.dropout,
            "answer": c.answer_dropout,
        }
        super().__init__(
            c,
            position=Learned(c.max_len, c.d_model),
            segment=None,
            pooler=Pooler(c.d_model, "relu") if HEADS[c.head].pools else None,
            act=c.act,
            norm_eps=NORM_EPS,
            head_dropout=dropout.get(c.head, 0.0),
        )

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E): tokens and positions embedded, then the encoder."""
        if batch.segments is not None:
            raise ValueError("this model does not tell sentence A from sentence B: give it no segments")
        x = self.embed(batch.ids) + self.position(self.positions(batch))  # (B, T, E)
        return self.encode(x, batch)  # (B, T, E)


# --- the hub's names -------------------------------------------------------------------------------------------------


class DistilBertLayout(EncoderLayout):
    """`distilbert` on the hub."""

    # `sinusoidal_pos_embds` is not here: it concerns new models; in a file the positions are a table like any other.
    names: Mapping[str, str] = {
        "d_model": "dim",
        "n_layers": "n_layers",
        "n_heads": "n_heads",
        "d_ff": "hidden_dim",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "act": "activation",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
        "answer_dropout": "qa_dropout",
    }
    fixed: Mapping[str, Any] = {"model_type": "distilbert", "tie_word_embeddings": True}
    heads: Mapping[str, str] = {
        "DistilBertModel": "encoder",
        "DistilBertForMaskedLM": "masked",
        "DistilBertForSequenceClassification": "classify",
        "DistilBertForMultipleChoice": "choose",
        "DistilBertForTokenClassification": "tag",
        "DistilBertForQuestionAnswering": "answer",
    }
    base = "distilbert."
    head_modules = (
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "pre_classifier", "classifier", "qa_outputs",
    )  # fmt: skip
    tied = r"^vocab_projector\.weight$"

    def rules(self, config: DistilBertConfig, base: str) -> list[Rule]:
        """The encoder and its head."""
        ours, theirs = "encoder.blocks.{}.", base + "transformer.layer.{}."
        return [
            rule("embed", base + "embeddings.word_embeddings"),
            rule("position", base + "embeddings.position_embeddings"),
            rule("embed_norm", base + "embeddings.LayerNorm"),
            rule(ours + "attention.query", theirs + "attention.q_lin"),
            rule(ours + "attention.key", theirs + "attention.k_lin"),
            rule(ours + "attention.value", theirs + "attention.v_lin"),
            rule(ours + "attention.output", theirs + "attention.out_lin"),
            rule(ours + "attention_norm", theirs + "sa_layer_norm"),
            rule(ours + "feedforward.up", theirs + "ffn.lin1"),
            rule(ours + "feedforward.down", theirs + "ffn.lin2"),
            rule(ours + "feedforward_norm", theirs + "output_layer_norm"),
            rule("head.dense", "vocab_transform"),
            rule("head.norm", "vocab_layer_norm"),
            rule("head.vocabulary.bias", "vocab_projector.bias", tensor=True),
            rule("head.pooler.dense", "pre_classifier"),
            rule("head.classifier", "qa_outputs" if config.head == "answer" else "classifier"),
        ]


DistilBertConfig.hub = DistilBertLayout(DistilBertConfig)
