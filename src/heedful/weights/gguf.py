"""Models from GGUF files: their metadata as our settings, their tensors by `gguf_layout`'s table of names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from heedful.models.base import Model
from heedful.models.registry import for_hub
from heedful.nn.position import Rotary
from heedful.text.gguf import NO_TOKENIZER
from heedful.text.tokenizer import Tokenizer
from heedful.weights.folder import OWN, meta_model
from heedful.weights.gguf_file import GgufFile
from heedful.weights.gguf_layout import ARCHITECTURES, KEYS, LONG_FACTORS, ROPE_FACTORS, gguf_weight_map
from heedful.weights.load import load_tensors

NEEDED = ("embedding_length", "block_count", "attention.head_count", "feed_forward_length", "context_length")
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def load_gguf(
    path: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    prepare: Callable[[Model], None] | None = None,
    integers: bool = False,
) -> tuple[Model, Tokenizer | None]:
    """The model in a GGUF file, in evaluation mode, and its tokenizer if it has one.

    Quantized weights become float32 unless `dtype` says otherwise. `prepare` and `integers` as in `load_folder`.
    """
    with GgufFile(path) as file:
        settings = config_from_gguf(file)
        model = meta_model(settings)
        weights = gguf_weight_map(model)
        if prepare is not None:
            prepare(model)
        load_tensors(model, file, weights=weights, device=device, dtype=dtype, integers=integers)
        model.special = {key: settings[key] for key in settings if key.endswith("_token_id")}
    named = file.fields.get("tokenizer.ggml.model", NO_TOKENIZER) != NO_TOKENIZER
    return model.eval(), Tokenizer.from_gguf(file.fields) if named else None


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The config.json, in our own layout, that says the same as the file's metadata."""
    kind = file.fields.get("general.architecture")
    if kind not in ARCHITECTURES.values():
        known = ", ".join(dict.fromkeys(ARCHITECTURES.values()))
        raise ValueError(f"{file.path.name} holds a {str(kind)[:50]!r}; GGUF files are read for {known}")
    fields = {k.removeprefix(f"{kind}."): v for k, v in file.fields.items() if k.startswith(f"{kind}.")}
    missing = [f"{kind}.{k}" for k in NEEDED if k not in fields]
    if missing:
        raise ValueError(f"{file.path.name} has no {', '.join(missing)} in its metadata")
    if kind == "llama" and fields.get("attention.sliding_window"):
        raise ValueError(f"{file.path.name} is a LLaMA with a sliding window, which is not supported")
    head = _head_size(fields)
    hub_type = "mixtral" if kind == "llama" and fields.get("expert_count") else _hub_type(str(kind))
    family = for_hub({"model_type": hub_type})
    known_settings = family.load().config_class.__dataclass_fields__
    found = {ours: fields[key] for key, ours in KEYS.items() if key in fields and ours in known_settings}
    if found.get("n_kv_heads") == found["n_heads"]:
        del found["n_kv_heads"]
    if not found.get("window", True):
        del found["window"]  # Phi-4's 0
    if "token_embd.weight" in file.blocks:
        found["vocab_size"] = file.blocks["token_embd.weight"].shape[0]
    if "tied" in known_settings:
        found["tied"] = "output.weight" not in file.blocks
    for setting, bias in ("attention_bias", "blk.0.attn_output.bias"), ("mlp_bias", "blk.0.ffn_up.bias"):
        if setting in known_settings:
            found[setting] = bias in file.blocks
    if "theta" in known_settings:
        found |= {"theta": fields.get("rope.freq_base", 10000.0), "scaling": _scaling(file, fields)}
        found |= _rotated(hub_type, fields, head)
    return {"model_type": OWN, "family": family.name, **found, **_own(hub_type, fields, head), **_tokens(file.fields)}


def _hub_type(kind: str) -> str:
    return next(hub_type for hub_type, architecture in ARCHITECTURES.items() if architecture == kind)


def _head_size(fields: Mapping[str, Any]) -> int:
    """The size of a head; ValueError where it cannot be told."""
    heads, width = fields["attention.head_count"], fields["embedding_length"]
    if type(heads) is not int or heads < 1 or type(width) is not int:
        raise ValueError(f"the metadata gives {str(heads)[:50]} heads: it must be one number for all layers")
    size = fields.get("attention.key_length", width // heads)
    if type(size) is not int or size < 1:
        raise ValueError(f"the metadata gives heads of size {str(size)[:50]}")
    return size


def _own(hub_type: str, fields: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Settings of some families that follow from the architecture alone."""
    if hub_type == "qwen3":
        return {"head_norms": True}
    if hub_type == "gemma2":
        return {"after_norms": True, "query_scale": gemma_2_scale(fields, head)}
    return {}


def gemma_2_scale(fields: Mapping[str, Any], head: int) -> float:
    """What Gemma 2 divides its scores by, squared: the format does not store it. It is the heads' size, except in the
    27B (46 layers)."""
    width = fields["embedding_length"] // fields["attention.head_count"]
    return float(width if fields["block_count"] == 46 else head)


# --- rotation --------------------------------------------------------------------------------------------------------


def _rotated(hub_type: str, fields: Mapping[str, Any], head: int) -> dict[str, Any]:
    """The share of each head that is rotated; ValueError unless it is all of it where nothing else is known."""
    rotated = fields.get("rope.dimension_count", head)
    setting = {"gpt_neox": "rotated", "phi3": "rotary_share"}.get(hub_type)
    if setting is not None and type(rotated) is int and 0 < rotated <= head:
        share = rotated / head
        return {setting: share if int(head * share) == rotated else math.nextafter(share, 1)}
    if rotated != head:
        raise ValueError(f"rope.dimension_count {str(rotated)[:50]} is not the heads' size {head}")
    return {}


def _scaling(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "none")
    original = fields.get("rope.scaling.original_context_length")
    also = {} if original is None else {"original_max_position_embeddings": original}
    if ROPE_FACTORS in file.blocks:
        return _llama_3(file, fields)
    if all(name in file.blocks for name in LONG_FACTORS.values()):
        factors = {ours: file.get(name).tolist() for ours, name in LONG_FACTORS.items()}
        return {"rope_type": "longrope", **factors, **also, "attention_factor": fields.get("rope.scaling.attn_factor")}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path.name}: rope scaling {str(kind)[:50]!r} is not known")
    return {"rope_type": kind, "factor": fields.get("rope.scaling.factor", 1.0), **also}


def _llama_3(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_scaling that gives the stored divisors: all LLaMAs from 3.1 on differ in the factor alone."""
    divisors = file.get(ROPE_FACTORS).double()
    scaling = {"rope_type": "llama3", "factor": round(float(divisors.max()), 3), **LLAMA_3}
    computed = rope_divisors(2 * len(divisors), float(fields.get("rope.freq_base", 10000.0)), scaling)
    if not torch.allclose(computed, divisors, rtol=1e-3):
        raise ValueError(f"{file.path.name}: {ROPE_FACTORS} are not LLaMA 3's, and others are not supported")
    return scaling


def rope_divisors(d_rotary: int, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """What a scaling divides each frequency of the rotation by."""
    plain, scaled = (Rotary(d_rotary, theta=theta, scaling=table).frequencies(1)[0] for table in (None, scaling))
    return plain.double() / scaled


# --- special tokens --------------------------------------------------------------------------------------------------


def _tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The special token ids; a chat model may end its turns, and its messages, with other tokens than its texts."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    get = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}.get
    found = {f"{name}_token_id": get(name) for name in names.values() if get(name) is not None}
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(index for index in ends if index is not None))
    if "eos_token_id" in found and len(ids) > 1:
        found["eos_token_id"] = ids
    return found
