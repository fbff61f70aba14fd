"""A pre-norm Transformer block forward and backward, each by one call of the C library, for training on a CPU.

As in FlashAttention (Dao et al. 2022), attention weights are computed for a few queries at a time, and recomputed in
the backward pass. So are dropout's random numbers, from a seed (csrc/block_dropout.c).

    B batch, T positions, E model width, F hidden width, H heads, G key/value heads, D head size
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from heedful.kernels.cpu.library import library, pointer
from heedful.kernels.cpu.ops import is_traced, register
from heedful.kernels.cpu.structs import BLOCK_PARTS, INT64, BlockArguments, BlockDropouts, BlockPointers

PARTS = BLOCK_PARTS
MAX_WORKSPACE = 2**26  # floats for the weight gradients, of which every thread has its own copy
TENSORS = (Tensor, nn.Parameter, FakeTensor)  # no other tensor subclasses


def supports_input(x: Tensor) -> bool:
    """Whether the kernels support the input: float32 on a CPU, not while compiling."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and type(x) in TENSORS
        and not torch.compiler.is_compiling()
        and (not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == torch.bfloat16)
        and library() is not None
    )


def supports_weight(p: Tensor | None) -> bool:
    """Whether the kernels support this parameter: contiguous float32 on a CPU."""
    return p is None or (p.dtype == torch.float32 and p.is_cpu and p.is_contiguous() and type(p) in TENSORS)


def fits_workspace(n_weights: int) -> bool:
    """Whether the gradients of `n_weights` weights, one copy per thread, stay within MAX_WORKSPACE."""
    return torch.get_num_threads() * n_weights <= MAX_WORKSPACE


def fused_block(
    x: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, *,
    n_heads: int, n_kv_heads: int, d_head: int, rms: bool, activation: int, causal: bool, interleaved: bool,
    scale: float, eps: float, dropout: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
) -> Tensor:  # fmt: skip
    """x (B, T, E) after a pre-norm block, differentiable once with respect to x and the weights.

    Under autocast the operands of the products with weights, and of their gradients, are rounded to bfloat16, if the
    processor has an instruction for such products. Sums, norms, attention and residuals are float32 in any case.

    weights       weight and bias of each of PARTS, None where there is none; without a gate weight, no gate
    mask          (B or 1, 1, T or 1, T) bool, True where attention is allowed, or None
    cos, sin      (B or 1, 1, T, R/2) rotary embedding, or None
    causal        whether to apply a causal mask in addition to `mask`
    activation    0 ReLU, 1 GELU, 2 GELU by tanh, 3 SiLU
    dropout       probabilities for attention weights, attention's output, the hidden layer and the network's output;
                  with any, a seed is drawn from torch's generator
    """
    if mask is not None:
        mask = mask.expand(-1, -1, x.shape[1], -1).contiguous()
    if cos is not None and sin is not None:
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
    bfloat16 = torch.is_autocast_enabled("cpu")
    settings = n_heads, n_kv_heads, d_head, rms, activation, causal, interleaved, scale, eps, list(dropout), bfloat16
    seed = x.new_empty((), dtype=torch.int64).random_() if any(dropout) else None
    y: Tensor = _Block.apply(x.contiguous(), settings, mask, cos, sin, seed, *weights)  # type: ignore[no-untyped-call]
    return y


class _Block(torch.autograd.Function):
    """The autograd function. It calls the operators only under tracing (ops.py), else the C library directly: with this
    many arguments the dispatcher takes 50 µs, as long as a small block."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, settings: tuple[Any, ...], mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
        seed: Tensor | None, *weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        arguments = _arguments(x, weights, mask, cos, sin, *settings)
        n_saved, ctx.n_workspace = _sizes(arguments)
        ctx.settings, ctx.arguments = settings, arguments
        workspace = _workspace(x, ctx.n_workspace)
        if is_traced(x):
            y, saved = torch.ops.heedful.block_forward(x, weights, mask, cos, sin, seed, workspace, *settings)
        else:
            y, saved = _call_forward(arguments, n_saved, x, weights, mask, cos, sin, seed, workspace)
        ctx.save_for_backward(x, saved, mask, cos, sin, seed, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, saved, mask, cos, sin, seed, *weights = ctx.saved_tensors
        inputs = mask, cos, sin, seed
        needed, d_y = ctx.needs_input_grad, d_y.contiguous()
        workspace = _workspace(x, ctx.n_workspace)
        if not is_traced(x):
            d_x, *found = _call_backward(ctx.arguments, d_y, x, saved, weights, *inputs, workspace, needed[6:])
            return d_x, None, None, None, None, None, *found
        wanted = [needed[0], *needed[6:]]
        d_x, *found = torch.ops.heedful.block_backward(
            d_y, x, saved, weights, *inputs, workspace, *ctx.settings, wanted
        )
        gradients = iter(found)
        return d_x, None, None, None, None, None, *[next(gradients) if want else None for want in needed[6:]]


_local = threading.local()


def _workspace(x: Tensor, size: int) -> Tensor:
    """Temporary memory of one call, reused by the next: allocating it takes longer than the computation.

    There is one per thread; for fake tensors one per FakeTensorMode, so that memory estimates count it once.
    """
    owner: Any = x.fake_mode if isinstance(x, FakeTensor) else _local
    workspace: Tensor | None = getattr(owner, "heedful_workspace", None)
    if workspace is None or len(workspace) < size:
        workspace = owner.heedful_workspace = torch.empty(size, dtype=torch.float32)
    return workspace


# --- the operators ---------------------------------------------------------------------------------------------------

_SETTINGS = (
    "int n_heads, int n_kv_heads, int d_head, bool rms, int activation, bool causal, bool interleaved, float scale, "
    "float eps, float[] dropout, bool bfloat16"
)
_INPUTS = "Tensor?[] weights, Tensor? mask, Tensor? cos, Tensor? sin, Tensor? seed, Tensor(a!) workspace"


def _arguments(
    x: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    n_heads: int, n_kv_heads: int, d_head: int, rms: bool, activation: int, causal: bool, interleaved: bool,
    scale: float, eps: float, dropout: Sequence[float], bfloat16: bool,
) -> BlockArguments:  # fmt: skip
    """The struct of arguments, without the addresses."""
    up, gated = weights[2 * PARTS.index("up")], weights[2 * PARTS.index("gate")] is not None
    assert up is not None
    arguments = BlockArguments(
        *x.shape, len(up), n_heads, n_kv_heads, d_head, rms, activation, gated, causal, bfloat16,
        torch.get_num_threads(), scale, eps,
    )  # fmt: skip
    arguments.dropout = BlockDropouts(*dropout)
    if mask is not None:
        arguments.mask_stride = 0 if len(mask) == 1 else mask.stride(0)
    if cos is not None:
        arguments.n_rotated_pairs, arguments.rotation_stride = cos.shape[-1], 0 if len(cos) == 1 else cos.stride(0)
        arguments.interleaved = interleaved
    return arguments


def _sizes(arguments: BlockArguments) -> tuple[int, int]:
    """Number of floats that forward saves for backward, and that each pass needs as workspace."""
    n_saved, n_workspace, lib = INT64(), INT64(), library()
    assert lib is not None
    lib.block_sizes(ctypes.byref(arguments), ctypes.byref(n_saved), ctypes.byref(n_workspace))
    return n_saved.value, n_workspace.value


def _point(
    arguments: BlockArguments, x: Tensor, saved: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, seed: Tensor | None, workspace: Tensor,
) -> None:  # fmt: skip
    """Fill in the addresses, valid as long as the tensors live."""
    arguments.x, arguments.saved, arguments.workspace = x.data_ptr(), saved.data_ptr(), workspace.data_ptr()
    arguments.mask, arguments.cos, arguments.sin, arguments.seed = map(pointer, (mask, cos, sin, seed))
    arguments.weights = BlockPointers(*map(pointer, weights))


def _call_forward(arguments: BlockArguments, n_saved: int, x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    lib = library()
    assert lib is not None
    y, saved = torch.empty_like(x), x.new_empty(n_saved)
    _point(arguments, x, saved, *inputs)
    arguments.y = y.data_ptr()
    lib.block_forward(ctypes.byref(arguments))
    return y, saved


def _call_backward(
    arguments: BlockArguments, d_y: Tensor, x: Tensor, saved: Tensor, weights: Sequence[Tensor | None],
    mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, seed: Tensor | None, workspace: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    lib = library()
    assert lib is not None
    d_x, *found = _gradients_like(x, weights, wanted)
    _point(arguments, x, saved, weights, mask, cos, sin, seed, workspace)
    arguments.gradients = BlockPointers(*map(pointer, found))
    arguments.d_y, arguments.d_x = d_y.data_ptr(), pointer(d_x)
    lib.block_backward(ctypes.byref(arguments))
    return [d_x, *found]


def _block_forward(
    x: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    seed: Tensor | None, workspace: Tensor, *settings: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arguments = _arguments(x, weights, mask, cos, sin, *settings)
    return _call_forward(arguments, _sizes(arguments)[0], x, weights, mask, cos, sin, seed, workspace)


def _block_forward_shape(
    x: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    seed: Tensor | None, workspace: Tensor, *settings: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n_saved, _ = _sizes(_arguments(x, weights, mask, cos, sin, *settings))
    return torch.empty_like(x), x.new_empty(n_saved)


def _gradients_like(x: Tensor, weights: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Uninitialized gradients of x and of the weights that need one."""
    pairs = zip(weights, wanted, strict=True)
    return [torch.empty_like(x), *[torch.empty_like(w) if want and w is not None else None for w, want in pairs]]


def _block_backward(
    d_y: Tensor, x: Tensor, saved: Tensor, weights: Sequence[Tensor | None], mask: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, seed: Tensor | None, workspace: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    *settings, wanted = rest
    arguments = _arguments(x, weights, mask, cos, sin, *settings)
    found = _call_backward(arguments, d_y, x, saved, weights, mask, cos, sin, seed, workspace, wanted[1:])
    return [t for t in found if t is not None]


def _block_backward_shape(d_y: Tensor, x: Tensor, saved: Tensor, weights: Any, *rest: Any) -> list[Tensor]:
    return [t for t in _gradients_like(x, weights, rest[-1][1:]) if t is not None]


register(f"block_forward(Tensor x, {_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)", _block_forward, _block_forward_shape)
register(
    f"block_backward(Tensor d_y, Tensor x, Tensor saved, {_INPUTS}, {_SETTINGS}, bool[] wanted) -> Tensor[]",
    _block_backward,
    _block_backward_shape,
)


# FLOPs as papers count them: products with weights, and of all queries with all keys and values; no recomputation.


def _attention_flops(x: Sequence[int], n_heads: int, d_head: int) -> int:
    return 4 * x[0] * n_heads * x[1] ** 2 * d_head


@register_flop_formula(torch.ops.heedful.block_forward)
def _block_forward_flops(x: Sequence[int], weights: Sequence[Any], *given: Any, **_: Any) -> int:
    n_heads, d_head = given[5], given[7]
    products = 2 * x[0] * x[1] * sum(math.prod(w) for w in weights if w is not None and len(w) == 2)
    return products + _attention_flops(x, n_heads, d_head)


@register_flop_formula(torch.ops.heedful.block_backward)
def _block_backward_flops(d_y: Any, x: Sequence[int], saved: Any, weights: Sequence[Any], *given: Any, **_: Any) -> int:
    n_heads, d_head, wanted = given[5], given[7], given[-1]
    total = 2 * _attention_flops(x, n_heads, d_head)
    qkv = [2 * PARTS.index(part) for part in ("query", "key", "value")]
    for i, w in enumerate(weights):
        if w is not None and len(w) == 2:  # the gradient of the input, and that of the weight
            total += 2 * x[0] * x[1] * math.prod(w) * ((wanted[0] or i not in qkv) + wanted[1 + i])
    return total
