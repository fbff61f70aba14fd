from transformers import GPTNeoConfig, GPTNeoForCausalLM, GPTNeoForSequenceClassification

from support.case import VOCAB, Classifier, Decoder

TINY = dict(
    hidden_size=64, num_layers=4, num_heads=4, vocab_size=VOCAB, max_position_embeddings=64, window_size=4,
    attention_types=[[["global", "local"], 2]], bos_token_id=1, eos_token_id=2, attn_implementation="eager",
)  # fmt: skip


def neo(head=GPTNeoForCausalLM, **changes):
    return lambda: head(GPTNeoConfig(**{**TINY, **changes}))


CASES = [
    Decoder("gpt-neo", neo(resid_dropout=0.1, embed_dropout=0.2)),
    Decoder("gpt-neo-untied", neo(num_layers=2, attention_types=[[["global", "local"], 1]], tie_word_embeddings=False)),
    Classifier("gpt-neo-classify", neo(GPTNeoForSequenceClassification, num_labels=3, pad_token_id=0)),
    Decoder("gpt-neo-mixed", neo(attention_types=[[["local"], 2], [["global", "local"], 1]], intermediate_size=48)),
]
