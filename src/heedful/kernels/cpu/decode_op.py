"""A decode or prefill step through a stack of blocks, by one call of the C library.

M tokens, E model width
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from heedful.kernels.cpu.library import library
from heedful.kernels.cpu.structs import INT64, DecodeLayer, DecodeStep, LayerCache, NormWeights

__all__ = ["MAX_TOKENS", "SINGLE_BLOCK", "DecodeLayer", "DecodeStep", "LayerCache", "NormWeights", "decode"]

SINGLE_BLOCK = 2**40  # block_size where a row's cache is one contiguous block, as in C
MAX_TOKENS = 256  # tokens per call of the C function, to bound the memory of activations


def decode(layers: Any, caches: Any, step: DecodeStep, rows: Any, positions: Any, n_memory: Any, x: Tensor) -> None:
    """Run x (M, E) through all layers, in place, and write the keys and values to the caches.

    layers, caches         arrays of DecodeLayer and LayerCache
    rows, positions        arrays of M longs; n_memory likewise, or None
    step                   with everything set but n_tokens, rows, positions and n_memory

    MAX_TOKENS tokens are processed at a time; later tokens attend to the cached keys and values of earlier ones.
    """
    lib, threads = library(), torch.get_num_threads()
    assert lib is not None
    cos, sin, bias, n = step.cos, step.sin, step.bias, len(rows)
    for begin in range(0, n, MAX_TOKENS):
        step.n_tokens = min(MAX_TOKENS, n - begin)
        offset = begin * ctypes.sizeof(INT64)
        step.rows, step.positions = ctypes.addressof(rows) + offset, ctypes.addressof(positions) + offset
        step.n_memory = None if n_memory is None else ctypes.addressof(n_memory) + offset
        step.cos, step.sin = (t and t + 4 * begin * step.rotation_stride for t in (cos, sin))
        step.bias = bias and bias + 4 * begin * step.bias_token_stride
        if not lib.decode(layers, len(layers), caches, ctypes.byref(step), x[begin].data_ptr(), threads):
            raise MemoryError(f"no memory to decode {step.n_tokens} tokens")
