from transformers import GPTJConfig, GPTJForCausalLM

from support.case import VOCAB, Decoder

TINY = dict(
    n_embd=64, n_layer=2, n_head=4, rotary_dim=4, vocab_size=VOCAB, n_positions=64, bos_token_id=1,
    eos_token_id=2, attn_implementation="eager",
)  # fmt: skip


def gptj(**changes):
    return lambda: GPTJForCausalLM(GPTJConfig(**{**TINY, **changes}))


CASES = [
    Decoder("gpt-j", gptj()),
    Decoder("gpt-j-wide", gptj(rotary_dim=8, n_inner=48)),
]
