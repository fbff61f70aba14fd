from dataclasses import dataclass

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)

from heedful.models.base import Batch
from heedful.train.objectives import Objective, classification, multi_label, question_answering, regression
from support.case import VOCAB, Encoder

TINY = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB,
    max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    attn_implementation="eager",
)  # fmt: skip


def bert(head, **changes):
    return lambda: head(BertConfig(**{**TINY, **changes}))


@dataclass
class Choice(Encoder):
    """Each row is a question with its choices: tokens (B, C, T), lengths (B, C)."""

    objective: Objective = classification

    def batch(self) -> Batch:
        g = torch.Generator().manual_seed(5)
        tokens = torch.randint(3, VOCAB, (3, 4, 9), generator=g)
        lengths = torch.tensor([[9, 5, 7, 9], [4, 4, 9, 6], [8, 9, 3, 5]])
        segments = (torch.arange(9) >= 3).long().expand_as(tokens).contiguous() if self.segmented else None
        return Batch(tokens, lengths, segments=segments, targets=torch.tensor([2, 0, 3]))

    def _call(self, reference, batch, **more):
        n = batch.tokens.shape[-1]
        mask = torch.ones_like(batch.tokens) if batch.lengths is None else torch.arange(n) < batch.lengths[..., None]
        if self.segmented:
            more["token_type_ids"] = batch.segments
        return reference(input_ids=batch.tokens, attention_mask=mask.long(), **more)

    def counted(self, batch):
        return torch.ones(len(batch.tokens), dtype=torch.bool)

    def idle(self, parameter):
        return parameter == "head.classifier.bias"  # the same for every choice: the softmax over them does not see it

    def rows(self, batch):
        # The choices of one question are of unequal length themselves: they stay padded.
        return [
            Batch(
                batch.tokens[i : i + 1],
                batch.lengths[i : i + 1],
                segments=batch.segments[i : i + 1] if self.segmented else None,
            )
            for i in range(len(batch.tokens))
        ]


CASES = [
    Encoder("bert-pretraining", bert(BertForPreTraining), paired=True),
    Encoder("bert-masked", bert(BertForMaskedLM)),
    Encoder("bert-next-sentence", bert(BertForNextSentencePrediction), classification, n_labels=2),
    Encoder("bert-classify", bert(BertForSequenceClassification, num_labels=3), classification),
    Encoder(
        "bert-multi-label",
        bert(BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        multi_label,
    ),
    Encoder("bert-regress", bert(BertForSequenceClassification, num_labels=1), regression),
    Choice("bert-choose", bert(BertForMultipleChoice)),
    Encoder("bert-tag", bert(BertForTokenClassification, num_labels=3), classification, per_token=True),
    Encoder("bert-answer", bert(BertForQuestionAnswering), question_answering),
]
