"""The structs passed to the C library (csrc/structs.h); their layouts are compared when it is loaded.

N outputs, K inputs, M tokens, B rows, H heads, G key/value heads, D head size, S positions
"""

from __future__ import annotations

import ctypes

from torch import Tensor

POINTER, INT64, INT, FLOAT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_double

ABI_VERSION = 2  # as in structs.h
BLOCK_PARTS = ("attention_norm", "feedforward_norm", "query", "key", "value", "output", "up", "gate", "down")
BlockPointers = POINTER * (2 * len(BLOCK_PARTS))  # a weight and a bias of each part
BLOCK_DROPOUTS = ("weights", "attention", "hidden", "feedforward")
BlockDropouts = DOUBLE * len(BLOCK_DROPOUTS)


class PackedMatrix(ctypes.Structure):
    """A packed weight (N, K) with its scales and bias."""

    tensors: tuple[Tensor, Tensor | None, Tensor | None]  # weight, scales and bias, held so that they are not freed

    _fields_ = (
        ("kind", INT64), ("n_inputs", INT64), ("n_outputs", INT64), ("weight", POINTER), ("scales", POINTER),
        ("bias", POINTER),
    )  # fmt: skip


class NormWeights(ctypes.Structure):
    """A LayerNorm (kind 1) or RMSNorm (kind 2) over `size` numbers; kind 0 is none."""

    _fields_ = (("kind", INT64), ("size", INT64), ("weight", POINTER), ("bias", POINTER), ("eps", DOUBLE))


class DecodeLayer(ctypes.Structure):
    """A block's settings and packed weights; in gated layers `up` has the gate's outputs before its own."""

    _fields_ = (
        *((name, INT64) for name in ("residual", "activation", "gated", "window", "n_heads", "n_kv_heads", "d_head")),
        ("scale", DOUBLE), ("cross_scale", DOUBLE),
        *((name, NormWeights) for name in (
            "attention_norm", "attention_post_norm", "cross_norm", "feedforward_norm", "feedforward_post_norm",
            "query_norm", "key_norm",
        )),
        *((name, PackedMatrix) for name in ("qkv", "output", "cross_query", "cross_output", "up", "down")),
    )  # fmt: skip


class LayerCache(ctypes.Structure):
    """A layer's KV cache, (blocks, G, positions in a block, D), and its encoder keys and values (B, G, S, D); strides
    are in bytes."""

    _fields_ = (
        ("kind", INT64), ("keys", POINTER), ("values", POINTER), ("block_stride", INT64), ("head_stride", INT64),
        ("position_stride", INT64),
        ("cross_keys", POINTER), ("cross_values", POINTER), ("cross_row_stride", INT64), ("cross_head_stride", INT64),
        ("cross_position_stride", INT64),
    )  # fmt: skip


class DecodeStep(ctypes.Structure):
    """The inputs of a decode step beside weights and caches.

    rows, positions        (M,) the row of each token and its position in it
    block_tables           (B, max_blocks) the blocks of each row's cache
    block_size             positions in a block
    clear_blocks           whether a block is zeroed when its first position is written
    cos, sin               (M or 1, n_rotated_pairs) or none; rotation_stride between tokens
    bias                   (M or 1, H or 1, S) added to the scores of self-attention, or none
    n_memory               (M,) positions of the encoder's output to attend to, or none
    norm                   the norm after the last layer
    """

    _fields_ = (
        ("n_tokens", INT64), ("width", INT64), ("rows", POINTER), ("positions", POINTER), ("block_tables", POINTER),
        ("max_blocks", INT64), ("block_size", INT64), ("clear_blocks", INT64), ("cos", POINTER), ("sin", POINTER),
        ("n_rotated_pairs", INT64), ("rotation_stride", INT64), ("interleaved", INT64), ("bias", POINTER),
        ("bias_token_stride", INT64), ("bias_head_stride", INT64), ("n_memory", POINTER),
        ("norm", NormWeights),
    )  # fmt: skip


class BlockArguments(ctypes.Structure):
    """The arguments of a block's forward and backward pass in training."""

    _fields_ = (
        *((name, INT64) for name in ("n_sequences", "length", "width", "hidden", "n_heads", "n_kv_heads", "d_head")),
        *((name, INT64) for name in ("rms", "activation", "gated", "causal", "bfloat16", "threads")),
        ("scale", DOUBLE), ("eps", DOUBLE), ("weights", BlockPointers), ("gradients", BlockPointers),
        ("mask", POINTER), ("mask_stride", INT64),
        ("cos", POINTER), ("sin", POINTER), ("n_rotated_pairs", INT64), ("rotation_stride", INT64),
        ("interleaved", INT64),
        *((name, POINTER) for name in ("x", "d_y", "y", "d_x")),
        ("dropout", BlockDropouts), ("seed", POINTER), ("saved", POINTER), ("workspace", POINTER),
    )  # fmt: skip


class AdamWSettings(ctypes.Structure):
    """The hyperparameters of an AdamW step."""

    _fields_ = tuple((name, DOUBLE) for name in ("lr", "beta1", "beta2", "eps", "weight_decay"))


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    PackedMatrix, NormWeights, DecodeLayer, LayerCache, DecodeStep, BlockArguments, AdamWSettings,
)  # fmt: skip


class _AbiField(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", INT64), ("size", INT64))


def check_layouts(lib: ctypes.CDLL) -> None:
    """Raise ValueError unless the library has the version and the struct layouts that are defined here."""
    lib.abi_version.restype, lib.abi_fields.restype = INT64, ctypes.POINTER(_AbiField)
    if lib.abi_version() != ABI_VERSION:
        raise ValueError(f"the library has ABI version {lib.abi_version()}, not {ABI_VERSION}")
    n = INT64()
    fields = lib.abi_fields(ctypes.byref(n))
    theirs = {fields[i].name.decode(): (fields[i].offset, fields[i].size) for i in range(n.value)}
    ours = {s.__name__: (0, ctypes.sizeof(s)) for s in STRUCTS}
    for struct in STRUCTS:
        for field in struct._fields_:
            place = getattr(struct, field[0])
            ours[f"{struct.__name__}.{field[0]}"] = place.offset, place.size
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{name} is at (offset, size) {ours.get(name)} in Python and {theirs.get(name)} in the library"
            )
