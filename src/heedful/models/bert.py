"""BERT (Devlin et al. 2019), and what has its layout, such as MiniLM's sentence encoders.

A bidirectional encoder over sentence A or the pair A, B, pre-trained to fill in hidden words and to tell whether B
follows A, then fine-tuned with a small head (`heedful.models.heads`). The small ones are those of
"Well-Read Students Learn Better" (Turc et al. 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from heedful.models.base import Batch
from heedful.models.encoder import EncoderConfig, EncoderModel, bert_layout
from heedful.models.heads import HEADS
from heedful.models.mapping import WeightMap, rule
from heedful.nn.embed import Embedding
from heedful.nn.head import Pooler
from heedful.nn.position import Learned


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    head: str = "pretraining"
    n_segments: int = 2
    act: str = "gelu"
    norm_eps: float = 1e-12
    classifier_dropout: float | None = None  # `dropout` unless given

    hub_names: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "n_segments": "type_vocab_size",
        "act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "classifier_dropout": "classifier_dropout",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        "model_type": "bert",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    hub_heads: ClassVar[Mapping[str, str]] = {
        "BertModel": "pooler",
        "BertForPreTraining": "pretraining",
        "BertForMaskedLM": "masked",
        "BertForNextSentencePrediction": "next_sentence",
        "BertForSequenceClassification": "classify",
        "BertForMultipleChoice": "choose",
        "BertForTokenClassification": "tag",
        "BertForQuestionAnswering": "answer",
    }


class Bert(EncoderModel):
    family = "bert"
    config_class = BertConfig
    config: BertConfig

    def __init__(self, config: BertConfig) -> None:
        c = config
        labels = c.head in ("classify", "choose", "tag")
        super().__init__(
            c,
            position=Learned(c.max_len, c.d_model),
            segment=Embedding(c.n_segments, c.d_model),
            pooler=Pooler(c.d_model) if HEADS[c.head].pools else None,
            act=c.act,
            norm_eps=c.norm_eps,
            head_dropout=(c.dropout if c.classifier_dropout is None else c.classifier_dropout) if labels else 0.0,
        )

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E): tokens, sentences and positions embedded, then the encoder."""
        x = self.embed(batch.ids) + self.embed_segments(batch.segments) + self.position(self.positions(batch))
        return self.encode(x, batch)

    def weight_map(self) -> WeightMap:
        head = self.config.head
        base = "" if head in ("encoder", "pooler") else "bert."
        last = {"next_sentence": "cls.seq_relationship", "answer": "qa_outputs"}.get(head, "classifier")
        rules = [
            *bert_layout(base),
            rule("head.pooler.dense", base + "pooler.dense"),
            rule("head.dense", "cls.predictions.transform.dense"),
            rule("head.norm", "cls.predictions.transform.LayerNorm"),
            rule("head.vocabulary.bias", "cls.predictions.bias", tensor=True),
            rule("head.next_sentence", "cls.seq_relationship"),
            rule("head.classifier", last),
        ]
        heads = ("pooler", "cls.predictions", "cls.seq_relationship", "classifier", "qa_outputs")
        return self._map(rules, "bert.", heads, [r"^cls\.predictions\.decoder\."])
