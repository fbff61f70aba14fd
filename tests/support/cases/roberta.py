from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
)

from heedful.train.objectives import classification, question_answering
from support.case import VOCAB, Encoder
from support.cases.bert import Choice

TINY = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB,
    max_position_embeddings=66, type_vocab_size=1, layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, attn_implementation="eager",
)  # fmt: skip


def roberta(head, **changes):
    return lambda: head(RobertaConfig(**{**TINY, **changes}))


CASES = [
    Encoder("roberta-masked", roberta(RobertaForMaskedLM), segmented=False),
    Encoder("roberta-relu", roberta(RobertaForMaskedLM, hidden_act="relu"), segmented=False),
    Encoder(
        "roberta-classify",
        roberta(RobertaForSequenceClassification, num_labels=3),
        classification,
        segmented=False,
    ),
    Choice("roberta-choose", roberta(RobertaForMultipleChoice), segmented=False),
    Encoder(
        "roberta-tag",
        roberta(RobertaForTokenClassification, num_labels=3),
        classification,
        segmented=False,
        per_token=True,
    ),
    Encoder("roberta-answer", roberta(RobertaForQuestionAnswering), question_answering, segmented=False),
]
