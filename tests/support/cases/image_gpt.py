from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

from support.case import VOCAB, Decoder

TINY = dict(
    n_embd=64, n_layer=2, n_head=4, vocab_size=VOCAB + 1, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, attn_implementation="eager",
)  # fmt: skip

CASES = [
    Decoder("image-gpt", lambda: ImageGPTForCausalImageModeling(ImageGPTConfig(**TINY))),
]
