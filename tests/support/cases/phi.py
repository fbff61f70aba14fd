from transformers import Phi3Config, Phi3ForCausalLM

from support.case import Decoder
from support.cases.llama import TINY

LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 1.7, 2.0, 2.4, 2.7, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 14.0, 16.0],
}  # fmt: skip


def phi3(**changes):
    return lambda: Phi3ForCausalLM(Phi3Config(**{**TINY, **changes}))


CASES = [
    Decoder("phi3", phi3(sliding_window=5, resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.2)),
    # Which divisors are used depends on the length: generation passes 18 in one case, the other is always beyond.
    Decoder("phi3-longrope", phi3(rope_parameters={**LONGROPE}, original_max_position_embeddings=18)),
    Decoder(
        "phi3-longrope-long",
        phi3(rope_parameters={**LONGROPE, "attention_factor": 1.2}, original_max_position_embeddings=1),
    ),
    Decoder("phi4-mini", phi3(partial_rotary_factor=0.5, tie_word_embeddings=True)),
]
