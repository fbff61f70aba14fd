from transformers import MistralConfig, MistralForCausalLM, MistralForSequenceClassification

from support.case import Classifier, Decoder
from support.cases.llama import TINY


def mistral(head=MistralForCausalLM, **changes):
    return lambda: head(MistralConfig(**{**TINY, **changes}))


CASES = [
    Decoder("mistral", mistral(sliding_window=5)),
    Decoder("mistral-v0.3", mistral(sliding_window=None, head_dim=16)),
    Classifier("mistral-classify", mistral(MistralForSequenceClassification, num_labels=3, sliding_window=5)),
]
