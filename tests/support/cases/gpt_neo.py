from transformers import GPTNeoConfig, GPTNeoForCausalLM

from support.case import VOCAB, Decoder

TINY = dict(
    hidden_size=64, num_layers=4, num_heads=4, vocab_size=VOCAB, max_position_embeddings=64, window_size=4,
    attention_types=[[["global", "local"], 2]], bos_token_id=1, eos_token_id=2, attn_implementation="eager",
)  # fmt: skip


def neo(**changes):
    return lambda: GPTNeoForCausalLM(GPTNeoConfig(**{**TINY, **changes}))


CASES = [
    Decoder("gpt-neo", neo()),
    Decoder("gpt-neo-mixed", neo(attention_types=[[["local"], 2], [["global", "local"], 1]], intermediate_size=48)),
]
