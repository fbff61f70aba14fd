from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForMultipleChoice,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
)

from heedful.train.objectives import classification, question_answering
from support.case import VOCAB, Encoder
from support.cases.bert import Choice

TINY = dict(
    dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=VOCAB, max_position_embeddings=64, dropout=0.0,
    attention_dropout=0.0, seq_classif_dropout=0.0, qa_dropout=0.0, attn_implementation="eager",
)  # fmt: skip


def distilbert(head, **changes):
    return lambda: head(DistilBertConfig(**{**TINY, **changes}))


CASES = [
    Encoder("distilbert-masked", distilbert(DistilBertForMaskedLM), segmented=False),
    Encoder(
        "distilbert-classify",
        distilbert(DistilBertForSequenceClassification, num_labels=3),
        classification,
        segmented=False,
    ),
    Choice("distilbert-choose", distilbert(DistilBertForMultipleChoice), segmented=False),
    Encoder(
        "distilbert-tag",
        distilbert(DistilBertForTokenClassification, num_labels=3),
        classification,
        segmented=False,
        per_token=True,
    ),
    Encoder("distilbert-answer", distilbert(DistilBertForQuestionAnswering), question_answering, segmented=False),
]
