from transformers import Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM

from support.case import Decoder
from support.cases.llama import TINY

CASES = [
    Decoder("gemma1-biases", lambda: GemmaForCausalLM(GemmaConfig(**TINY, head_dim=16, attention_bias=True))),
    Decoder("gemma1", lambda: GemmaForCausalLM(GemmaConfig(**{**TINY, "num_key_value_heads": 1, "head_dim": 16}))),
    Decoder(
        "gemma2",
        # Caps so low that they show.
        lambda: Gemma2ForCausalLM(
            Gemma2Config(
                **TINY,
                head_dim=16,
                query_pre_attn_scalar=12,
                sliding_window=5,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=3.0,
            )
        ),
    ),
]
