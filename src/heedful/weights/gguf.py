"""Models from GGUF files: their metadata as the hub's config.json, their tensors by the hub's names.

From there on a GGUF file is loaded like any folder. llama.cpp rotates neighbouring dimensions where the hub rotates
halves, so LLaMA's queries and keys lie permuted in the file; Gemma's norms lie there with their 1 added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import Model
from heedful.nn.position import Rotary
from heedful.weights.folder import meta_model
from heedful.weights.gguf_file import GgufFile
from heedful.weights.load import load_tensors

# GGUF's names -> the hub's, the same for every decoder here except for Gemma 2's norms.
NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
GEMMA_2: Mapping[str, str] = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2")
ROPE_FACTORS = "rope_freqs.weight"  # LLaMA 3.1's stretched rotation, a divisor for each pair of dimensions


def load_gguf(
    path: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    prepare: Callable[[Model], None] | None = None,
) -> tuple[Model, dict[str, Any]]:
    """The model in a GGUF file, in evaluation mode, and the file's metadata (where its tokenizer is).

    Quantized weights become float32 unless `dtype` says otherwise. `prepare` as in `load_folder`.
    """
    with GgufFile(path) as file:
        hub = hub_config_from_gguf(file)
        model = meta_model(hub)
        if prepare is not None:
            prepare(model)
        load_tensors(model, GgufSource(file, hub), device=device, dtype=dtype)
        model.special = {key: hub[key] for key in hub if key.endswith("_token_id")}
        return model.eval(), file.fields


class GgufSource:
    """A GGUF file's tensors by the hub's names and in the hub's layout: a `TensorSource`."""

    mapped, fresh = False, True

    def __init__(self, file: GgufFile, hub: Mapping[str, Any]) -> None:
        self.file, self.hub = file, hub
        self.real = {self._hub_name(name): name for name in file.names() if name != ROPE_FACTORS}

    def _hub_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        number = re.search(r"\.(\d+)\.", stem)
        pattern = stem if number is None else stem.replace(number[0], ".{}.", 1)
        table = {**NAMES, **GEMMA_2} if self.hub["model_type"] == "gemma2" else NAMES
        if pattern not in table:
            return name  # it will be listed as extra
        return table[pattern].format(*(number.groups() if number else ())) + "." + suffix

    def names(self) -> Iterable[str]:
        """The tensors' names."""
        return self.real

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.file.shape(self.real[name])

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self.file.dtype(self.real[name])

    def get(self, name: str) -> Tensor:
        """A tensor, dequantized, in the hub's layout."""
        tensor = self.file.get(self.real[name])
        kind = self.hub["model_type"]
        if kind == "llama" and re.search(r"\.[qk]_proj\.", name):
            n_heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            return unpermute(tensor, self.hub[n_heads])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1
        return tensor

    def release(self, name: str) -> None:
        """Nothing to free: every tensor is read into memory of its own."""


def unpermute(x: Tensor, n_heads: int) -> Tensor:
    """Reorder each head's rows from interleaved rotary pairs (0, 1) to halves (0, D/2)."""
    return x.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# --- metadata --------------------------------------------------------------------------------------------------------


def hub_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The config.json that says the same as the file's metadata."""
    kind = file.fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{file.path.name} holds a {str(kind)[:50]!r}; GGUF files are read for {', '.join(ARCHITECTURES)}"
        )
    fields = {k.removeprefix(f"{kind}."): v for k, v in file.fields.items() if k.startswith(f"{kind}.")}
    if fields.get("expert_count"):
        raise ValueError(f"{file.path.name} has experts, which are not read from GGUF; use its safetensors")
    if kind == "llama" and fields.get("attention.sliding_window"):
        raise ValueError(f"{file.path.name} is a LLaMA with a sliding window, which is not supported")
    hub = {theirs: fields[ours] for ours, theirs in KEYS.items() if ours in fields}
    missing = [f"{kind}.{k}" for k in NEEDED if k not in fields]
    if missing:
        raise ValueError(f"{file.path.name} has no {', '.join(missing)} in its metadata")
    hub["model_type"] = kind
    hub.setdefault("num_key_value_heads", hub["num_attention_heads"])
    embedding = file.blocks.get("token_embd.weight")
    hub["vocab_size"] = embedding.shape[0] if embedding else fields.get("vocab_size")
    hub["tie_word_embeddings"] = "output.weight" not in file.blocks
    hub["rope_theta"] = fields.get("rope.freq_base", 10000.0)
    hub["rope_scaling"] = _scaling(file, fields)
    _check_rotated(fields, hub)
    if kind == "gemma2":
        # The format does not store the scale of the scores: it is the head's size, except in the 27B (46 layers).
        width = hub["hidden_size"] // hub["num_attention_heads"]
        hub["query_pre_attn_scalar"] = width if hub["num_hidden_layers"] == 46 else hub.get("head_dim", width)
    return hub | _tokens(file.fields)


KEYS: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
NEEDED = ("embedding_length", "block_count", "attention.head_count", "feed_forward_length", "context_length")


def _scaling(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.blocks:
        return _llama_3(file, fields)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path.name}: rope scaling {str(kind)[:50]!r} is not known")
    table = {"rope_type": kind, "factor": fields.get("rope.scaling.factor", 1.0)}
    original = fields.get("rope.scaling.original_context_length")
    return table if original is None else table | {"original_max_position_embeddings": original}


def _llama_3(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_scaling that gives the stored divisors: all LLaMAs from 3.1 on differ in the factor alone."""
    divisors = file.get(ROPE_FACTORS).double()
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(divisors.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = float(fields.get("rope.freq_base", 10000.0))
    plain, scaled = (
        Rotary(2 * len(divisors), theta=theta, scaling=table).frequencies(1)[0] for table in (None, scaling)
    )
    if not torch.allclose(plain.double() / scaled, divisors, rtol=1e-3):
        raise ValueError(f"{file.path.name}: {ROPE_FACTORS} are not LLaMA 3's, and others are not supported")
    return scaling


def _check_rotated(fields: Mapping[str, Any], hub: Mapping[str, Any]) -> None:
    """ValueError unless the whole head is rotated, as in every architecture read here."""
    heads = hub["num_attention_heads"]
    if type(heads) is not int or heads < 1 or type(hub["hidden_size"]) is not int:
        raise ValueError(f"the metadata gives {str(heads)[:50]} heads: it must be one number for all layers")
    size = hub.get("head_dim", hub["hidden_size"] // heads)
    if fields.get("rope.dimension_count", size) != size:
        raise ValueError(f"rope.dimension_count {fields['rope.dimension_count']} is not the heads' size {size}")


def _tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The special token ids; a chat model may end its turns with another token than its texts."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    get = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}.get
    found = {f"{name}_token_id": get(name) for name in names.values() if get(name) is not None}
    turn = fields.get("tokenizer.ggml.eot_token_id")
    if turn is not None and "eos_token_id" in found and turn != found["eos_token_id"]:
        found["eos_token_id"] = [found["eos_token_id"], turn]
    return found
