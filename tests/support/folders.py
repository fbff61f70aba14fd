"""Small models on the disk, and ways to spoil them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from heedful.loaded import Loaded
from heedful.models.base import Model
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.llama import Llama, LlamaConfig
from heedful.models.t5 import T5, T5Config
from heedful.text import train_unigram
from heedful.weights.save import save


def tiny_llama(**changes: Any) -> Model:
    torch.manual_seed(0)
    settings = dict(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=80, max_len=64)
    model = Llama.create(LlamaConfig(**{**settings, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.15 + (p.ndim == 1))
    return model.eval()


def tiny_gpt(**changes: Any) -> Model:
    torch.manual_seed(0)
    settings = dict(d_model=32, n_layers=2, n_heads=4, vocab_size=61, max_len=64, dropout=0.0)
    model = GPT.create(GPTConfig(**{**settings, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.15 + (p.ndim == 1))
    return model.eval()


def tiny_translator() -> Loaded:
    """A T5 whose pieces are of English letters alone."""
    tokenizer = train_unigram(["What a fine day it was.", "The quick brown fox jumps over the lazy dog."] * 3, 60)
    config = T5Config(d_model=16, n_layers=1, n_heads=2, d_head=8, d_ff=16, vocab_size=tokenizer.vocab_size)
    return Loaded(T5.create(config).eval(), tokenizer, "tiny-translator")


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


def saved(folder: Path, model: Model | None = None) -> Path:
    save(model or tiny_llama(), folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header at all."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data
