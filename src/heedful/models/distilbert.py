"""DistilBERT (Sanh et al. 2019): BERT with every other layer, taught by BERT itself.

No segments and no pooler; its classifier reads [CLS] through a layer with ReLU instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from heedful.models.base import Batch
from heedful.models.encoder import EncoderConfig, EncoderModel
from heedful.models.heads import HEADS
from heedful.models.mapping import WeightMap, rule
from heedful.nn.head import Pooler
from heedful.nn.position import Learned

NORM_EPS = 1e-12  # the layout has no key for it


@dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    head: str = "masked"
    n_layers: int = 6
    act: str = "gelu"
    classifier_dropout: float = 0.2
    answer_dropout: float = 0.1

    # `sinusoidal_pos_embds` says how a new model's positions begin; in a file they are a table like any other.
    hub_names: ClassVar[Mapping[str, str]] = {
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
    hub_fixed: ClassVar[Mapping[str, Any]] = {"model_type": "distilbert", "tie_word_embeddings": True}
    hub_heads: ClassVar[Mapping[str, str]] = {
        "DistilBertModel": "encoder",
        "DistilBertForMaskedLM": "masked",
        "DistilBertForSequenceClassification": "classify",
        "DistilBertForMultipleChoice": "choose",
        "DistilBertForTokenClassification": "tag",
        "DistilBertForQuestionAnswering": "answer",
    }


class DistilBert(EncoderModel):
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
        return self.encode(self.embed(batch.ids) + self.position(self.positions(batch)), batch)

    def weight_map(self) -> WeightMap:
        base = "" if self.config.head == "encoder" else "distilbert."
        ours, theirs = "encoder.blocks.{}.", base + "transformer.layer.{}."
        rules = [
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
            rule("head.classifier", "qa_outputs" if self.config.head == "answer" else "classifier"),
        ]
        heads = (
            "vocab_transform", "vocab_layer_norm", "vocab_projector", "pre_classifier", "classifier", "qa_outputs",
        )  # fmt: skip
        return self._map(rules, "distilbert.", heads, [r"^vocab_projector\.weight$"])
