"""A small chat model, and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path

from heedful.text import train_bpe
from heedful.weights.save import save
from support.folders import tiny_llama

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": "A rose is red."}]
CHATS = (json.dumps({"messages": TALK}) + "\n") * 4


def write_chat_model(folder: Path, max_len: int = 128) -> Path:
    """A random LLaMA with ChatML, whose config.json does not say that <|im_end|> ends a text."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = train_bpe(["What is red? A rose is red. user assistant"] * 9, 300, special=special)
    tokenizer.chat_template = CHATML
    model = tiny_llama(vocab_size=len(tokenizer), max_len=max_len, tied=False)
    model.special = {"eos_token_id": tokenizer.id("<|endoftext|>")}
    save(model, folder, tokenizer)
    return folder
