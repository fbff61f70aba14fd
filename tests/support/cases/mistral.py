from transformers import MistralConfig, MistralForCausalLM

from support.case import Decoder
from support.cases.llama import TINY


def mistral(**changes):
    return lambda: MistralForCausalLM(MistralConfig(**{**TINY, **changes}))


CASES = [
    Decoder("mistral", mistral(sliding_window=5)),
    Decoder("mistral-v0.3", mistral(sliding_window=None, head_dim=16)),
]
