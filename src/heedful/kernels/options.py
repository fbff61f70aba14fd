"""Allow-lists of module options: a fast replacement is used only if it supports every option that a module has.

An option is an attribute, parameter, buffer or submodule of a module, set unless it is None. So a module that gains an
option runs on the plain path until its replacement supports it, instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from heedful.nn.attention import Attention, AttentionInfo
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.mask import Mask
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Rotation

EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes of every module; what FSDP and others add is not listed
LINEAR = frozenset({"in_features", "out_features", "weight", "bias"})
DROPOUT = frozenset({"p", "inplace"})
PROJECTIONS = frozenset({"query", "key", "value", "output"})
SHAPE = frozenset({"n_heads", "n_kv_heads", "d_head", "scale", "window", "softcap", "dropout", "watch"})
ATTENTION = PROJECTIONS | SHAPE | {"query_norm", "key_norm"}
FEEDFORWARD = frozenset({"act", "up", "gate", "down", "dropout"})
NORMS = frozenset({"attention_norm", "attention_after", "cross_norm", "feedforward_norm", "feedforward_after"})
BLOCK = NORMS | {"attention", "cross", "feedforward", "dropout"}
STACK = frozenset({"causal", "blocks", "norm", "rotary", "bias", "recompute"})
INFO = frozenset({"mask", "rotation", "bias", "memory", "counts"})
MASK = frozenset({"n_queries", "n_keys", "causal", "starts", "lengths", "documents", "device", "_dense"})
# What models can do that are divided over processes: what all of these compute together.
TENSOR_PARALLEL = frozenset({"generate", "stream", "translate"})
ROTATION = frozenset({"cos", "sin", "layout"})


def has_only(module: nn.Module | None, kind: type[nn.Module], known: Collection[str]) -> bool:
    """Whether the module is exactly of this class, not a subclass, and has no options beside `known`."""
    if type(module) is not kind:
        return False
    given = (module.__dict__, module._parameters, module._buffers, module._modules)
    return all(
        value is None or name in known or name in EVERY_MODULE for options in given for name, value in options.items()
    )


def is_linear(module: nn.Module | None) -> bool:
    """A plain linear layer."""
    return has_only(module, nn.Linear, LINEAR)


def is_norm(module: nn.Module | None) -> bool:
    """A LayerNorm with a weight, or an RMSNorm, with supported options only."""
    if type(module) is nn.LayerNorm:
        known = {"normalized_shape", "eps", "elementwise_affine", "weight", "bias"}
        return module.weight is not None and has_only(module, nn.LayerNorm, known)
    return has_only(module, RMSNorm, {"eps", "offset", "weight"})


def is_dropout(module: nn.Module | None) -> bool:
    """A plain dropout layer."""
    return has_only(module, nn.Dropout, DROPOUT)


def is_attention(module: nn.Module | None, kind: type[nn.Module] = Attention) -> bool:
    """Attention with supported options only."""
    return has_only(module, kind, ATTENTION)


def is_feedforward(module: nn.Module | None, kind: type[nn.Module] = FeedForward) -> bool:
    """A feed-forward layer with supported options only."""
    return has_only(module, kind, FEEDFORWARD)


def is_head(module: nn.Module | None) -> bool:
    """A language head with supported options only."""
    return has_only(module, LanguageHead, {"scale", "softcap", "weight", "bias"})


def is_embedding(module: nn.Module | None) -> bool:
    """An embedding table with supported options only."""
    return has_only(module, Embedding, {"scale", "weight"})


def is_info(info: AttentionInfo) -> bool:
    """Whether the inputs of a forward pass have supported fields only."""
    rotation = info.rotation
    return (
        type(info) is AttentionInfo
        and _only(info, INFO)
        and type(info.mask) is Mask
        and _only(info.mask, MASK)
        and (rotation is None or (type(rotation) is Rotation and _only(rotation, ROTATION)))
    )


def _only(thing: object, known: frozenset[str]) -> bool:
    options = vars(thing)
    return options.keys() <= known or all(name in known or value is None for name, value in options.items())


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has forward or backward hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
