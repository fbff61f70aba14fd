"""Linear layers whose weights are packed for the C kernels: float32, float16, bfloat16, int8 and int4.

Their speed is close to memory bandwidth; RESULTS.md compares them with PyTorch's operators.

    N outputs, K inputs, M rows
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from heedful.kernels.cpu.library import library, pointer
from heedful.kernels.cpu.ops import is_traced, register
from heedful.kernels.cpu.structs import PackedMatrix

__all__ = ["PRECISIONS", "PackedMatrix", "pack_int4_panels", "pack_panels", "packed_linear", "packed_matrix"]

PANEL = 32  # outputs in a panel, as in linear.c
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4")


def pack_panels(weight: Tensor, size: int) -> Tensor:
    """(N, K) -> (N/32, K/size, 32, size): panels of 32 outputs with `size` inputs adjacent, zero-padded. A view."""
    n_outputs, n_inputs = weight.shape
    if n_inputs % size or n_outputs % PANEL:
        weight = F.pad(weight, (0, -n_inputs % size, 0, -n_outputs % PANEL))
    return weight.reshape(-1, PANEL, weight.shape[1] // size, size).transpose(1, 2)


def pack_int4_panels(ints: Tensor) -> Tensor:
    """Integers 0 to 15 (N, K) -> bytes (N/32, K/4, 16, 4): output n in the low, output n + 16 in the high half."""
    panels = pack_panels(ints, 4)
    return panels[:, :, :16] | panels[:, :, 16:] << 4


def packed_matrix(
    precision: str, weight: Tensor, n_inputs: int, n_outputs: int, bias: Tensor | None, scales: Tensor | None
) -> PackedMatrix:
    """The struct for `packed_linear`; it keeps the tensors alive, a copy of it does not."""
    kind = PRECISIONS.index(precision)
    matrix = PackedMatrix(kind, n_inputs, n_outputs, weight.data_ptr(), pointer(scales), pointer(bias))
    matrix.tensors = weight, scales, bias
    return matrix


def packed_linear(matrix: PackedMatrix, x: Tensor) -> Tensor:
    """x (..., K) in float32 -> x Wᵀ + b (..., N)."""
    if is_traced(x):
        y: Tensor = torch.ops.heedful.packed_linear(x, *matrix.tensors, matrix.kind, matrix.n_outputs)
        return y
    return _multiply(matrix, x)


def _multiply(matrix: PackedMatrix, x: Tensor) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], matrix.n_outputs)
    lib = library()
    assert lib is not None and x.shape[-1] == matrix.n_inputs and x.dtype == torch.float32
    n_rows = x.numel() // matrix.n_inputs
    if not lib.packed_linear(ctypes.byref(matrix), x.data_ptr(), n_rows, y.data_ptr(), torch.get_num_threads()):
        raise MemoryError(f"no memory for a product of {n_rows} rows")
    return y


def _packed_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, kind: int, n_outputs: int
) -> Tensor:
    return _multiply(packed_matrix(PRECISIONS[kind], weight, x.shape[-1], n_outputs, bias, scales), x)


def _packed_linear_shape(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, kind: int, n_outputs: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n_outputs)


register(
    "packed_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int kind, int n_outputs) -> Tensor",
    _packed_linear,
    _packed_linear_shape,
)


@register_flop_formula(torch.ops.heedful.packed_linear)
def _packed_linear_flops(x: list[int], *given: Any, out_shape: list[int], **_: Any) -> int:
    return 2 * math.prod(x) * out_shape[-1]
