from dataclasses import dataclass

from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from support.case import VOCAB, EncoderDecoder

TINY = dict(
    d_model=32, d_kv=16, num_heads=4, num_layers=2, d_ff=48, vocab_size=VOCAB, dropout_rate=0.0,
    relative_attention_num_buckets=8, relative_attention_max_distance=10, decoder_start_token_id=0,
    attn_implementation="eager",
)  # fmt: skip


def t5(**changes):
    return lambda: T5ForConditionalGeneration(T5Config(**{**TINY, **changes}))


@dataclass
class Untied(EncoderDecoder):
    """v1.1 and later. The reference ties a new model whatever its config says; checkpoints bring their own head."""

    def make_untied(self):
        model = self.make()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    def build_reference(self):
        return EncoderDecoder(self.name, self.make_untied).build_reference()


GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)

CASES = [
    EncoderDecoder("t5", t5()),
    Untied("t5-v1.1", t5(**GATED)),
    Untied("byt5", t5(**GATED, num_layers=3, num_decoder_layers=1)),
]
