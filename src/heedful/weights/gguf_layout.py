"""GGUF's layout of the decoders that llama.cpp has: names of tensors and keys of metadata, for reading and for writing.

Decoders call their parts and settings the same, so that one table of names and one of keys serve all; what an
architecture stores in another form is a rule of its own before them. llama.cpp rotates neighbouring dimensions where we
rotate halves, so LLaMA's queries and keys lie permuted; Gemma's norms lie there with their 1 added; GPT-2, GPT-NeoX and
Phi-3 have queries, keys and values in one matrix, Mixtral its experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import Model
from heedful.models.mapping import Fuse, Rule, Shapes, WeightMap, rule

# A family's model_type on the hub -> "general.architecture".
ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
}

OURS, THEIRS = "decoder.blocks.{}.", "blk.{}."
NAMES: Mapping[str, str] = {
    "embed": "token_embd",
    "position": "position_embd",
    "decoder.norm": "output_norm",
    "head": "output",
    OURS + "attention_norm": THEIRS + "attn_norm",
    OURS + "attention.query": THEIRS + "attn_q",
    OURS + "attention.key": THEIRS + "attn_k",
    OURS + "attention.value": THEIRS + "attn_v",
    OURS + "attention.output": THEIRS + "attn_output",
    OURS + "attention.query_norm": THEIRS + "attn_q_norm",
    OURS + "attention.key_norm": THEIRS + "attn_k_norm",
    OURS + "attention_after": THEIRS + "post_attention_norm",
    OURS + "feedforward_norm": THEIRS + "ffn_norm",
    OURS + "feedforward.gate": THEIRS + "ffn_gate",
    OURS + "feedforward.up": THEIRS + "ffn_up",
    OURS + "feedforward.down": THEIRS + "ffn_down",
    OURS + "feedforward.router": THEIRS + "ffn_gate_inp",
    OURS + "feedforward_after": THEIRS + "post_ffw_norm",
}
NORMS = tuple(name for name in NAMES if name.endswith(("norm", "after")))
QUERY_KEY_VALUE = rule([OURS + f"attention.{part}" for part in ("query", "key", "value")], THEIRS + "attn_qkv", Fuse())
GATE_UP = rule([OURS + "feedforward.gate", OURS + "feedforward.up"], THEIRS + "ffn_up", Fuse())

# Tensors that are no weights: divisors of the rotation's frequencies, one for each pair of dimensions.
ROPE_FACTORS = "rope_freqs.weight"  # LLaMA 3.1's
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}  # LongRoPE's

# Keys of the metadata, after "ARCHITECTURE." -> our settings, which not every family has.
KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "context_length": "max_len",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "d_ff",
    "hidden_activation": "act",
    "use_parallel_residual": "parallel",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "d_head",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.sliding_window": "window",
    "attn_logit_softcapping": "score_cap",
    "final_logit_softcapping": "logit_cap",
    "expert_count": "n_experts",
    "expert_used_count": "n_chosen",
    "rope.freq_base": "theta",
}


class Interleave:
    """Their rows of each head are ours with the halves of the rotary pairs (0, D/2) interleaved to (0, 1)."""

    by_rows = True

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """(H·D/2·2, ...) -> (H·2·D/2, ...)."""
        return [t.unflatten(0, (self.n_heads, -1, 2)).transpose(1, 2).flatten(0, 2) for t in theirs]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """(H·2·D/2, ...) -> (H·D/2·2, ...)."""
        return [t.unflatten(0, (self.n_heads, 2, -1)).transpose(1, 2).flatten(0, 2) for t in ours]

    def shapes(self, ours: Shapes) -> Shapes:
        """Unchanged."""
        return ours


class AddOne:
    """Their norms' weights are ours plus 1."""

    by_rows = False

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """Minus 1."""
        return [t - 1 for t in theirs]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Plus 1."""
        return [t.float() + 1 for t in ours]

    def shapes(self, ours: Shapes) -> Shapes:
        """Unchanged."""
        return ours


class StackExperts:
    """Their one tensor (experts, out, in) is our matrices of all experts."""

    by_rows = True

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """The matrices, each in memory of its own."""
        return [t.clone() for t in theirs[0].unbind()]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Stack."""
        return [torch.stack(ours)]

    def shapes(self, ours: Shapes) -> Shapes:
        """The number of experts before the matrices' shape."""
        return [torch.Size([len(ours), *ours[0]])]


def hub_type(model: Model) -> str:
    """The hub's model_type of a decoder that llama.cpp has; ValueError for any other model."""
    kind = str(model.config.to_hub().get("model_type", model.family))
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"a {kind} cannot be written as GGUF: of llama.cpp's models these are written: {known}")
    if model.config.head != "language":
        raise ValueError("only models that generate can be written as GGUF: this one has no language head")
    return kind


def gguf_weight_map(model: Model) -> WeightMap:
    """The map between our tensors' names and GGUF's."""
    plain = [rule(ours, theirs) for ours, theirs in NAMES.items()]
    ignored = [rf"^{name}$" for name in (ROPE_FACTORS, *LONG_FACTORS.values())]
    return WeightMap([*_own_rules(hub_type(model), model.config), *plain], ignored=ignored)


def _own_rules(kind: str, config: Any) -> Sequence[Rule]:
    """What an architecture stores in another form; these rules come before those of NAMES."""
    if kind in ("gpt2", "gpt_neox"):
        return [QUERY_KEY_VALUE]
    if kind == "phi3":
        return [QUERY_KEY_VALUE, GATE_UP]
    if kind in ("gemma", "gemma2"):
        return [rule(name, NAMES[name], AddOne()) for name in NORMS]
    if ARCHITECTURES[kind] != "llama":
        return []
    heads = {OURS + "attention.query": config.n_heads, OURS + "attention.key": config.n_kv_heads or config.n_heads}
    rules = [rule(name, NAMES[name], Interleave(n_heads)) for name, n_heads in heads.items()]
    for part in ("gate", "up", "down") if kind == "mixtral" else ():
        experts = [OURS + f"feedforward.experts.{i}.{part}" for i in range(config.n_experts)]
        rules.append(rule(experts, THEIRS + f"ffn_{part}_exps", StackExperts()))
    return rules
