"""Models as GGUF files, written with llama.cpp's own package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from heedful.models.base import Model
from heedful.models.mapping import to_hub
from heedful.weights.gguf import GEMMA_2, NAMES

Kind = gguf.GGMLQuantizationType


def interleave_heads(x: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp does to LLaMA's queries and keys."""
    return x.reshape(n_heads, 2, x.shape[0] // n_heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def gguf_name(name: str, kind: str) -> str:
    table = {**NAMES, **GEMMA_2} if kind == "gemma2" else NAMES
    stem, _, suffix = name.rpartition(".")
    parts = stem.split(".")
    number = next((p for p in parts if p.isdigit()), None)
    pattern = ".".join("{}" if p == number else p for p in parts)
    (found,) = [ours for ours, theirs in table.items() if theirs == pattern]
    return found.format(number) + "." + suffix


def write_gguf(path: Path, model: Model, arch: str, kind: Kind = Kind.F32, **fields) -> dict[str, np.ndarray]:
    """The model as a GGUF file; returns the tensors as they were stored, dequantized."""
    c = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_context_length(c.max_len)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.theta)
    if c.d_head:
        writer.add_key_length(c.d_head)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    stored = {}
    for name, tensor in to_hub(model.weight_map(), {n: p.detach() for n, p in model.named_parameters()}):
        x = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            x = interleave_heads(x, c.n_heads)
        if arch == "llama" and ".k_proj." in name:
            x = interleave_heads(x, c.n_kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            x = x + 1
        ours = gguf_name(name, arch)
        if x.ndim == 1 or kind == Kind.F32:  # norms stay as they are in llama.cpp's files too
            writer.add_tensor(ours, np.ascontiguousarray(x))
            stored[ours] = x
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(x), kind)
            writer.add_tensor(ours, packed, raw_dtype=kind)
            stored[ours] = gguf.quants.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
