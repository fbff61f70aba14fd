"""A model's settings as GGUF metadata, and what llama.cpp does not have of them.

Nothing is written that llama.cpp would read and compute in another way: it is refused. A sliding window that llama.cpp
does not apply is left out, and the file's context ends with it: up to there both are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import Model
from heedful.nn.position import Rotary
from heedful.weights.gguf import LLAMA_3, gemma_2_scale, rope_divisors
from heedful.weights.gguf_layout import ARCHITECTURES, KEYS, LONG_FACTORS, ROPE_FACTORS, hub_type

GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # llama.cpp computes the tanh form for all of them
LAYER_NORMS = ("gpt2", "gpt_neox")  # the others have RMSNorm
RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
YARN: Mapping[str, Any] = {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # which llama.cpp computes with


def gguf_metadata(model: Model) -> dict[str, Any]:
    """The metadata of a model, without its tokenizer's; ValueError if llama.cpp does not have such a model."""
    kind, config = hub_type(model), model.config
    found = {key: getattr(config, ours) for key, ours in KEYS.items() if getattr(config, ours, None) is not None}
    del found[RMS_EPSILON if kind in LAYER_NORMS else LAYER_EPSILON]
    found["feed_forward_length"] = config.d_ff or 4 * config.d_model
    found["attention.head_count_kv"] = getattr(config, "n_kv_heads", None) or config.n_heads
    found["context_length"] = getattr(config, "context_length", None) or config.max_len
    if "attention.key_length" in found:
        found["attention.value_length"] = found["attention.key_length"]
    problem = _problem(kind, config, found)
    if problem:
        raise ValueError(f"llama.cpp has no {kind} {problem}: this model cannot be written as GGUF")
    windows = [w for layer in range(config.n_layers) if (w := _window(config, layer)) is not None]
    if windows and kind != "gemma2":
        del found["attention.sliding_window"]
        if min(windows) < found["context_length"]:
            found["context_length"] = min(windows)
            warnings.warn(
                f"llama.cpp has no window for a {kind}: the file's context is the window, {min(windows)} tokens",
                stacklevel=4,
            )
    if (rotary := _rotary(model)) is not None:
        found |= {"rope.dimension_count": rotary.d_rotary, **_scaling(kind, rotary)}
    architecture = ARCHITECTURES[kind]
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in found.items()}


def _window(config: Any, layer: int) -> int | None:
    return config.window_at(layer) if hasattr(config, "window_at") else None


def _rotary(model: Model) -> Rotary | None:
    rotary = getattr(model.get_submodule("decoder"), "rotary", None)
    return rotary if isinstance(rotary, Rotary) else None


def _problem(kind: str, config: Any, found: Mapping[str, Any]) -> str | None:
    """What llama.cpp does not have of a config: the end of "llama.cpp has no MODEL"."""
    head = getattr(config, "d_head", None) or config.d_model // config.n_heads
    if getattr(config, "act", "gelu") not in GELUS:
        return f"with the activation {config.act}"
    if kind == "gpt_neox" and not config.attention_bias:
        return "without biases on queries, keys and values"
    if kind in ("qwen3", "gemma", "gemma2", "olmo2") and config.attention_bias:
        return "with biases in its attention"
    if kind in ("phi3", "olmo2") and head * config.n_heads != config.d_model:
        return f"with {config.n_heads} heads of {head} in a width of {config.d_model}"
    if kind in ("gemma", "gemma2") and not config.tied:
        return "whose head is not the embedding"
    if kind == "gemma2":
        if None in (config.score_cap, config.logit_cap, config.window):
            return "without caps of scores and logits and a window"
        if config.query_scale not in (None, gemma_2_scale(found, head)):
            return f"with a query scale of {config.query_scale:g}"
    return None


# --- rotation --------------------------------------------------------------------------------------------------------


def _scaling(kind: str, rotary: Rotary) -> dict[str, Any]:
    """The metadata of a stretched rotation; ValueError for one that llama.cpp does not have."""
    scaling, original = rotary.scaling, int(rotary.scaling.get("original_max_position_embeddings", rotary.max_len))
    if rotary.kind == "default":
        return {}
    if rotary.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if rotary.kind == "longrope":
        factor = rotary.frequencies(1)[1]
        return {"rope.scaling.attn_factor": factor, "rope.scaling.original_context_length": original}
    if rotary.kind == "llama3":
        if ARCHITECTURES[kind] != "llama" or any(scaling.get(key, value) != value for key, value in LLAMA_3.items()):
            raise ValueError(f"llama.cpp has LLaMA 3's rope scaling for LLaMA alone, not {scaling} of a {kind}")
        return {}
    allowed = {"rope_type", "factor", "original_max_position_embeddings", *YARN}
    if set(scaling) - allowed or any(scaling.get(key, value) != value for key, value in YARN.items()):
        raise ValueError(f"llama.cpp has YaRN's own rope scaling, not {scaling}")
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": original,
    }


def rope_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors that tell of a stretched rotation, by their names in the file."""
    rotary = _rotary(model)
    if rotary is None or rotary.kind not in ("llama3", "longrope"):
        return {}
    if rotary.kind == "llama3":
        return {ROPE_FACTORS: rope_divisors(rotary.d_rotary, rotary.theta, rotary.scaling).float()}
    return {name: torch.tensor(rotary.scaling[ours]).float() for ours, name in LONG_FACTORS.items()}
