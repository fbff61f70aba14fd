from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from support.case import VOCAB, Classifier, Decoder

TINY = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    attn_implementation="eager",
)  # fmt: skip

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500000.0,
}  # fmt: skip


def llama(head=LlamaForCausalLM, **changes):
    return lambda: head(LlamaConfig(**{**TINY, **changes}))


CASES = [
    Decoder("llama2", llama(num_key_value_heads=4)),
    Decoder("llama3", llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})),
    Decoder("llama3.2", llama(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    Decoder(
        "smollm2",
        llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48, tie_word_embeddings=True),
    ),
    Decoder("llama-biases", llama(attention_bias=True, mlp_bias=True, attention_dropout=0.1)),
    Classifier("llama-classify", llama(LlamaForSequenceClassification, num_labels=3)),
]
