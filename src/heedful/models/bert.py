"""BERT (Devlin et al. 2019), and models of the same architecture, such as MiniLM's sentence encoders.

A bidirectional encoder over sentence A or the pair A, B, pre-trained to fill in masked words and to predict whether B
follows A, then fine-tuned with a small head (`heedful.models.heads`). The miniatures are those of "Well-Read Students
Learn Better" (Turc et al. 2019).

    B batch, C choices, T positions, E model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from heedful.models.base import Batch, Output, as_batch
from heedful.models.encoder import EncoderConfig, EncoderLayout, EncoderModel, bert_rules
from heedful.models.heads import HEADS
from heedful.models.mapping import Rule, rule
from heedful.nn.embed import Embedding
from heedful.nn.head import Pooler
from heedful.nn.position import Learned


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """BERT's settings; the defaults are those of BERT base."""

    head: str = "pretraining"
    n_segments: int = 2  # sentence A and B
    act: str = "gelu"
    norm_eps: float = 1e-12
    classifier_dropout: float | None = None  # `dropout` unless given

    heads: ClassVar[Sequence[str]] = (
        "encoder", "pooler", "pretraining", "masked", "next_sentence", "classify", "choose", "tag", "answer",
    )  # fmt: skip


class Bert(EncoderModel):
    """Token, segment and position embeddings, a norm, encoder blocks, a head."""

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
        positions = self.positions(batch)  # (B or 1, T)
        x = self.embed(batch.ids) + self.embed_segments(batch.segments) + self.position(positions)  # (B, T, E)
        return self.encode(x, batch)  # (B, T, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T), or (B, C, T) of choices -> the last hidden states and the head's logits."""
        batch = as_batch(batch)
        self.head.check(batch)
        hidden = self.hidden(batch.flattened())  # (B, T, E) or (B·C, T, E)
        return self.head.output(hidden.unflatten(0, batch.ids.shape[:-1]))


# --- the hub's names -------------------------------------------------------------------------------------------------


class BertLayout(EncoderLayout):
    """`bert` on the hub."""

    names: Mapping[str, str] = {
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
    fixed: Mapping[str, Any] = {
        "model_type": "bert",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    heads: Mapping[str, str] = {
        "BertModel": "pooler",
        "BertForPreTraining": "pretraining",
        "BertForMaskedLM": "masked",
        "BertForNextSentencePrediction": "next_sentence",
        "BertForSequenceClassification": "classify",
        "BertForMultipleChoice": "choose",
        "BertForTokenClassification": "tag",
        "BertForQuestionAnswering": "answer",
    }
    base = "bert."
    head_modules = ("pooler", "cls.predictions", "cls.seq_relationship", "classifier", "qa_outputs")
    tied = r"^cls\.predictions\.decoder\."

    def rules(self, config: BertConfig, base: str) -> list[Rule]:
        """The encoder, and a head whose last matrix has another name for every task."""
        last = {"next_sentence": "cls.seq_relationship", "answer": "qa_outputs"}.get(config.head, "classifier")
        return [
            *bert_rules(base),
            rule("head.pooler.dense", base + "pooler.dense"),
            rule("head.dense", "cls.predictions.transform.dense"),
            rule("head.norm", "cls.predictions.transform.LayerNorm"),
            rule("head.vocabulary.bias", "cls.predictions.bias", tensor=True),
            rule("head.next_sentence", "cls.seq_relationship"),
            rule("head.classifier", last),
        ]


BertConfig.hub = BertLayout(BertConfig)
