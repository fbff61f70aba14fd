"""The call into the C library that takes new tokens through a stack of blocks, and the structs it is given.

The layouts are those of the C structs of the same names; `decode` describes what each field means.

    M tokens, B rows, E model width, H heads, D head size, S positions
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from heedful.kernels.cpu.library import DOUBLE, LONG, POINTER, library
from heedful.kernels.cpu.linear import PackedMatrix

SINGLE_BLOCK = 2**40  # block_size where a row's cache is one contiguous block, as in C
MAX_TOKENS = 256  # tokens in one call of the C function: more would only need more memory for activations


class NormWeights(ctypes.Structure):
    """A LayerNorm (kind 1) or RMSNorm (kind 2) over `size` numbers; kind 0 is none."""

    _fields_ = (("kind", LONG), ("size", LONG), ("weight", POINTER), ("bias", POINTER), ("eps", DOUBLE))


class DecodeLayer(ctypes.Structure):
    """A block's settings and packed weights; `up` has the gate's outputs before its own where there is a gate."""

    _fields_ = (
        *((name, LONG) for name in ("residual", "activation", "gated", "window", "n_heads", "n_kv_heads", "d_head")),
        ("scale", DOUBLE), ("cross_scale", DOUBLE),
        *((name, NormWeights) for name in (
            "attention_norm", "attention_post_norm", "cross_norm", "feedforward_norm", "feedforward_post_norm",
            "query_norm", "key_norm",
        )),
        *((name, PackedMatrix) for name in ("qkv", "output", "cross_query", "cross_output", "up", "down")),
    )  # fmt: skip


class LayerCache(ctypes.Structure):
    """A layer's KV cache, (blocks, G, positions in a block, D), and its encoder keys and values (B, G, S, D)."""

    _fields_ = (
        ("keys", POINTER), ("values", POINTER), ("block_stride", LONG), ("head_stride", LONG),
        ("cross_keys", POINTER), ("cross_values", POINTER), ("cross_row_stride", LONG), ("cross_head_stride", LONG),
        ("cross_position_stride", LONG),
    )  # fmt: skip


class DecodeStep(ctypes.Structure):
    """What one call needs beside weights and caches.

    rows, positions        (M,) the row of each token and its position in it
    block_tables           (B, max_blocks) the blocks of each row's cache
    block_size             positions in a block
    clear_blocks           whether a block is zeroed when its first position is written
    cos, sin               (M or 1, n_rotated_pairs) or none; rotation_stride between tokens
    bias                   (M or 1, H or 1, S) added to the scores of self-attention, or none
    n_memory               (M,) positions of the encoder's output to attend to, or none
    """

    _fields_ = (
        ("n_tokens", LONG), ("width", LONG), ("rows", POINTER), ("positions", POINTER), ("block_tables", POINTER),
        ("max_blocks", LONG), ("block_size", LONG), ("clear_blocks", LONG), ("cos", POINTER), ("sin", POINTER),
        ("n_rotated_pairs", LONG), ("rotation_stride", LONG), ("interleaved", LONG), ("bias", POINTER),
        ("bias_token_stride", LONG), ("bias_head_stride", LONG), ("n_memory", POINTER),
    )  # fmt: skip


def decode(layers: Any, caches: Any, step: DecodeStep, rows: Any, positions: Any, n_memory: Any, x: Tensor) -> None:
    """Take x (M, E) through all layers in place; their keys and values are written to the caches.

    layers, caches         arrays of DecodeLayer and LayerCache
    rows, positions        arrays of M longs; n_memory likewise, or None
    step                   with everything set but n_tokens, rows, positions and n_memory

    At most MAX_TOKENS go at a time: later tokens see the keys and values of earlier ones.
    """
    lib, threads = library(), torch.get_num_threads()
    assert lib is not None
    cos, sin, bias, n = step.cos, step.sin, step.bias, len(rows)
    for begin in range(0, n, MAX_TOKENS):
        step.n_tokens = min(MAX_TOKENS, n - begin)
        offset = begin * ctypes.sizeof(LONG)
        step.rows, step.positions = ctypes.addressof(rows) + offset, ctypes.addressof(positions) + offset
        step.n_memory = None if n_memory is None else ctypes.addressof(n_memory) + offset
        step.cos, step.sin = (t and t + 4 * begin * step.rotation_stride for t in (cos, sin))
        step.bias = bias and bias + 4 * begin * step.bias_token_stride
        if not lib.decode(layers, len(layers), caches, ctypes.byref(step), x[begin].data_ptr(), threads):
            raise MemoryError(f"no memory to decode {step.n_tokens} tokens")
