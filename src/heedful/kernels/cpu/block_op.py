"""A pre-norm Transformer block forward and backward, each by one call of the C library, for training on a CPU.

Attention is computed as in FlashAttention (Dao et al. 2022): the weights of a few queries at a time, and again in the
backward pass.

    B batch, T positions, M = B T rows, E model width, F hidden width, H heads, G key/value heads, D head size
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heedful.kernels.cpu.library import library, pointer
from heedful.kernels.cpu.structs import BLOCK_PARTS, LONG, BlockArguments, BlockPointers

PARTS = BLOCK_PARTS
MAX_WORKSPACE = 2**26  # numbers, about, for the weight gradients of all threads: each sums up its own first
PLAIN = (nn.Parameter, Tensor)
rehearsing = False  # see `rehearsed`


def supports_input(x: Tensor) -> bool:
    """Whether the block kernels can run on x here and now: float32 on a CPU, no dispatch mode, no autocast."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and (rehearsing or type(x) is Tensor)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and (rehearsing or torch._C._len_torch_dispatch_stack() == 0)
        and library() is not None
    )


def supports_weight(p: Tensor | None) -> bool:
    """Whether the kernels can read this parameter."""
    return p is None or (
        p.dtype == torch.float32 and p.is_cpu and p.is_contiguous() and (rehearsing or type(p) in PLAIN)
    )


def fits_workspace(n_weights: int) -> bool:
    """Whether the gradients of so many weights, once per thread, stay within MAX_WORKSPACE."""
    return torch.get_num_threads() * n_weights <= MAX_WORKSPACE


def fused_block(
    x: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, *,
    n_heads: int, n_kv_heads: int, d_head: int, rms: bool, activation: int, causal: bool, interleaved: bool,
    scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """x (B, T, E) after a pre-norm block, differentiable once with respect to x and the weights.

    weights       weight and bias of each of PARTS, None where there is none; without a gate weight, no gate
    mask          (B or 1, 1, T or 1, T) bool, True where attention is allowed, or None
    cos, sin      (B or 1, 1, T, R/2) rotary embedding, or None
    causal        whether a position attends only to itself and those before it, beside what the mask says
    """
    hidden, gated = weights[2 * PARTS.index("up")], weights[2 * PARTS.index("gate")] is not None
    assert hidden is not None
    arguments = BlockArguments(
        *x.shape, len(hidden), n_heads, n_kv_heads, d_head, rms, activation, gated, causal, torch.get_num_threads(),
        scale, eps,
    )  # fmt: skip
    if mask is not None:
        mask = mask.expand(-1, -1, x.shape[1], -1).contiguous()
        arguments.mask_stride = 0 if len(mask) == 1 else mask.stride(0)
    if cos is not None and sin is not None:
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        arguments.n_rotated_pairs, arguments.rotation_stride = cos.shape[-1], 0 if len(cos) == 1 else cos.stride(0)
        arguments.interleaved = interleaved
    y: Tensor = _Block.apply(x.contiguous(), arguments, mask, cos, sin, *weights)  # type: ignore[no-untyped-call]
    return y


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arguments: BlockArguments, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
        *weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        n_kept, n_workspace = LONG(), LONG()
        lib = library()
        assert lib is not None
        lib.block_sizes(ctypes.byref(arguments), ctypes.byref(n_kept), ctypes.byref(n_workspace))
        y, kept, workspace = torch.empty_like(x), x.new_empty(n_kept.value), _workspace(n_workspace.value)
        ctx.arguments, ctx.n_workspace = arguments, n_workspace.value
        ctx.save_for_backward(x, kept, mask, cos, sin, *weights)
        if not rehearsing:
            _point(arguments, workspace, x, kept, mask, cos, sin, weights)
            arguments.y = y.data_ptr()
            lib.block_forward(ctypes.byref(arguments))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, kept, mask, cos, sin, *weights = ctx.saved_tensors
        arguments, workspace, wanted = ctx.arguments, _workspace(ctx.n_workspace), ctx.needs_input_grad[5:]
        d_y, d_x = d_y.contiguous(), torch.empty_like(x)
        found = [torch.empty_like(w) if want else None for w, want in zip(weights, wanted, strict=True)]
        if not rehearsing:
            lib = library()
            assert lib is not None
            _point(arguments, workspace, x, kept, mask, cos, sin, weights)
            arguments.gradients = BlockPointers(*map(pointer, found))
            arguments.d_y, arguments.d_x = d_y.data_ptr(), d_x.data_ptr()
            lib.block_backward(ctypes.byref(arguments))
        return d_x, None, None, None, None, *found


def _point(
    arguments: BlockArguments, workspace: Tensor, x: Tensor, kept: Tensor, mask: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, weights: Any,
) -> None:  # fmt: skip
    """Fill in the addresses, which hold as long as the tensors do."""
    arguments.x, arguments.kept, arguments.workspace = x.data_ptr(), kept.data_ptr(), workspace.data_ptr()
    arguments.mask, arguments.cos, arguments.sin = pointer(mask), pointer(cos), pointer(sin)
    arguments.weights = BlockPointers(*map(pointer, weights))


_local = threading.local()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Inside, tensors have no memory: outputs and workspace are allocated, and the kernels are not called."""
    global rehearsing
    before, rehearsing = rehearsing, True
    real, _local.workspace = getattr(_local, "workspace", None), None
    try:
        yield
    finally:
        rehearsing, _local.workspace = before, real


def _workspace(size: int) -> Tensor:
    """Memory for one call, reused by the next: new memory costs more than what is computed in it."""
    workspace: Tensor | None = getattr(_local, "workspace", None)
    if workspace is None or len(workspace) < size:
        workspace = _local.workspace = torch.empty(size, dtype=torch.float32)
    return workspace
