"""RoBERTa (Liu et al. 2019): BERT trained longer, on more text, by masked words alone.

What differs in the model: no next sentence, so no telling A from B; positions that begin after the padding's id (the
tables of its checkpoints have 514 rows for 512 positions); a classifier that reads <s> through a layer of its own.
Where we differ: the reference does not count padding tokens as positions wherever they stand; ours pads on the right.
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
class RobertaConfig(EncoderConfig):
    head: str = "masked"
    vocab_size: int = 50265
    max_len: int = 512
    pad_id: int = 1  # positions begin at the next number
    n_segments: int = 2  # 1 in the published checkpoints
    norm_eps: float = 1e-12  # 1e-5 in the published checkpoints
    classifier_dropout: float | None = None  # `dropout` unless given

    hub_names: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "pad_id": "pad_token_id",
        "n_segments": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "classifier_dropout": "classifier_dropout",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        "model_type": "roberta",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    hub_heads: ClassVar[Mapping[str, str]] = {
        "RobertaModel": "pooler",
        "RobertaForMaskedLM": "masked",
        "RobertaForSequenceClassification": "classify",
        "RobertaForMultipleChoice": "choose",
        "RobertaForTokenClassification": "tag",
        "RobertaForQuestionAnswering": "answer",
    }

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        read = super().read_hub(hub)
        return read | {"max_len": hub.get("max_position_embeddings", 512) - read.get("pad_id", 1) - 1}

    def to_hub(self) -> dict[str, Any]:
        return super().to_hub() | {"max_position_embeddings": self.max_len + self.pad_id + 1}


class Roberta(EncoderModel):
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
            act="gelu",
            norm_eps=c.norm_eps,
            head_dropout=dropout if c.head in ("classify", "choose", "tag") else 0.0,
        )

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states (B, T, E): tokens, sentences and positions embedded, then the encoder."""
        x = self.embed(batch.ids) + self.embed_segments(batch.segments) + self.position(self.positions(batch))
        return self.encode(x, batch)

    def weight_map(self) -> WeightMap:
        head = self.config.head
        base = "" if head in ("encoder", "pooler") else "roberta."
        last = {"classify": "classifier.out_proj", "answer": "qa_outputs"}.get(head, "classifier")
        rules = [
            *bert_layout(base),
            rule("head.pooler.dense", "classifier.dense" if head == "classify" else base + "pooler.dense"),
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.layer_norm"),
            rule("head.vocabulary.bias", "lm_head.bias", tensor=True),
            rule("head.classifier", last),
        ]
        heads = ("pooler", "lm_head", "classifier", "qa_outputs")
        return self._map(rules, "roberta.", heads, [r"^lm_head\.decoder\."])
