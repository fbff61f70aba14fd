"""Models as GGUF files, written with llama.cpp's own package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from heedful.models.base import Model
from heedful.models.mapping import to_hub

Kind = gguf.GGMLQuantizationType


def interleave_heads(x: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp does to LLaMA's queries and keys."""
    return x.reshape(n_heads, 2, x.shape[0] // n_heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def gguf_name(name: str, arch: str, n_layers: int) -> str:
    """The name that llama.cpp's own package gives a tensor of the hub's."""
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known.get(arch, gguf.MODEL_ARCH.LLAMA), n_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


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
        ours = gguf_name(name, "llama" if arch == "mamba" else arch, c.n_layers)
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
