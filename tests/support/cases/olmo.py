from transformers import Olmo2Config, Olmo2ForCausalLM

from support.case import Decoder
from support.cases.llama import TINY

CASES = [
    Decoder("olmo2", lambda: Olmo2ForCausalLM(Olmo2Config(**TINY))),
    Decoder("olmo2-biases", lambda: Olmo2ForCausalLM(Olmo2Config(**TINY, attention_bias=True, attention_dropout=0.1))),
]
