from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from support.case import VOCAB, Classifier, Decoder

TINY = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
)  # fmt: skip


def neox(head=GPTNeoXForCausalLM, **changes):
    return lambda: head(GPTNeoXConfig(**{**TINY, **changes}))


CASES = [
    Decoder("gpt-neox", neox(hidden_dropout=0.1, attention_dropout=0.2)),
    Classifier("gpt-neox-classify", neox(GPTNeoXForSequenceClassification, num_labels=3, pad_token_id=0)),
    Decoder("gpt-neox-sequential", neox(use_parallel_residual=False, attention_bias=False)),
    Decoder(
        "gpt-neox-relatives",
        neox(
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5,
            },
        ),
    ),
]  # fmt: skip
