from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from support.case import Classifier, Decoder
from support.cases.llama import TINY

WINDOW = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)


def qwen2(**changes):
    return lambda: Qwen2ForCausalLM(Qwen2Config(**{**TINY, **changes}))


def qwen3(head=Qwen3ForCausalLM, **changes):
    return lambda: head(Qwen3Config(**{**TINY, "head_dim": 16, **changes}))


CASES = [
    Decoder("qwen2", qwen2()),
    Decoder("qwen2-window", qwen2(**WINDOW)),
    Decoder("qwen2.5", qwen2(tie_word_embeddings=True)),
    Decoder("qwen3", qwen3(tie_word_embeddings=True)),
    Decoder("qwen3-window", qwen3(**WINDOW)),
    Decoder("qwen3-biases", qwen3(attention_bias=True, attention_dropout=0.1)),
    Classifier("qwen3-classify", qwen3(Qwen3ForSequenceClassification, num_labels=3, tie_word_embeddings=True)),
]
