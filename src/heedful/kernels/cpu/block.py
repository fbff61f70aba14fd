"""A block forwards and backwards by one call each of our kernels (training.c), for training on a CPU.

A step of a small model is a thousand operations of PyTorch's, and about half of its time goes to what lies between the
matrix products. `Block.forward` asks `can`, and `run` then does what it would itself do, to within rounding. It steps
aside for whatever it does not know: dropout, other norms and activations, adapters, lower precision, a cache, and
anyone who watches or hooks a part. Attention goes as in FlashAttention (Dao et al. 2022): the weights of a few queries
at a time, and once more on the way back.

    B batch, T positions, M = B T rows, E model width, F hidden width, H heads, G heads of keys and values, D head size
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heedful.kernels.cpu import native
from heedful.kernels.cpu.native import pointer
from heedful.nn.feedforward import FeedForward, gelu_tanh
from heedful.nn.norm import RMSNorm

if TYPE_CHECKING:
    from heedful.nn.attention import View
    from heedful.nn.block import Block

SOURCE = Path(__file__).with_name("training.c")
NEEDS = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
ACTIVATIONS = {F.relu: 0, F.gelu: 1, gelu_tanh: 2, F.silu: 3}

_LONG, _POINTER, _DOUBLE = ctypes.c_long, ctypes.c_void_p, ctypes.c_double
MAPS = ("query", "key", "value", "output", "up", "gate", "down")
PLAIN = (nn.Parameter, Tensor)
MOST = 2**26  # numbers of room for the gradients of all threads, about: each sums up its own first
rehearsing = False  # see `rehearsed`


_Pointers = _POINTER * (2 * (2 + len(MAPS)))  # of a weight and a bias each; the two norms come first


class _Block(ctypes.Structure):
    """A block, as training_block.h has it; what follows the fields named here is for the kernels alone."""

    _fields_ = (
        *((name, _LONG) for name in ("n_sequences", "length", "width", "hidden", "n_heads", "n_groups", "size")),
        *((name, _LONG) for name in ("rms", "act", "gated", "causal", "threads")),
        ("scale", _DOUBLE), ("eps", _DOUBLE), ("weights", _Pointers), ("gradients", _Pointers),
        ("mask", _POINTER), ("mask_row", _LONG),
        ("cos", _POINTER), ("sin", _POINTER), ("half", _LONG), ("turn_row", _LONG), ("interleaved", _LONG),
        *((name, _POINTER) for name in ("x", "d_y", "y", "d_x", "kept", "room")),
        ("rest", _LONG * 32),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be had."""
    loaded = native.load(SOURCE, NEEDS)
    if loaded is not None:
        loaded.block_layout.argtypes, loaded.block_layout.restype = (_POINTER,) * 3, None
        for call in (loaded.block_forward, loaded.block_backward):
            call.argtypes, call.restype = (_POINTER,), None
        assert loaded.block_bytes() <= ctypes.sizeof(_Block)
    return loaded


# --- which blocks, and when ------------------------------------------------------------------------------------------


def can(block: Block, x: Tensor, view: View) -> bool:
    """Whether `run` does the same as the block's own parts would."""
    return (
        block.training
        and torch.is_grad_enabled()
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and view.bias is None
        and (rehearsing or type(x) is Tensor)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and (rehearsing or torch._C._len_torch_dispatch_stack() == 0)  # nobody counts or replaces operations
        and library() is not None
        and _known(block)
    )


def _known(block: Block) -> bool:
    attention, network = block.attention, block.feedforward
    if type(network) is not FeedForward or block.residual != "pre":
        return False
    norms = (block.attention_norm, block.feedforward_norm)
    maps = [attention.query, attention.key, attention.value, attention.output, network.up, network.down]
    if network.gate is not None:
        maps.append(network.gate)
    return (
        block.dropout.p == attention.dropout == network.dropout.p == 0
        and network.act in ACTIVATIONS
        and _nothing_more(block)
        and _like(*norms)
        and all([type(part) is nn.Linear for part in maps])
        and torch.get_num_threads() * 4 * network.up.weight.numel() <= MOST
        and not any([_hooked(part) for part in (*maps, *norms, attention, network, block.dropout)])
        and all([_plain(p) for part in (*maps, *norms) for p in part._parameters.values()])  # type: ignore[union-attr]
    )


def _nothing_more(block: Block) -> bool:
    """No part that some families have and the kernels do not."""
    attention, network = block.attention, block.feedforward
    more = (
        block.cross, block.attention_after, block.feedforward_after, attention.joint, network.joint, attention.softcap,
        attention.query_norm, attention.key_norm,
    )  # fmt: skip
    return all([part is None for part in more]) and not attention.watch.on


def _like(one: nn.Module | None, two: nn.Module | None) -> bool:
    """Two norms of a kind the kernels know."""
    if type(one) is RMSNorm and type(two) is RMSNorm:
        return one.eps == two.eps and one.offset == two.offset == 0
    return (
        type(one) is nn.LayerNorm and type(two) is nn.LayerNorm and one.eps == two.eps
        and one.weight is not None and two.weight is not None
    )  # fmt: skip


def _hooked(part: nn.Module | None) -> bool:
    return part is not None and bool(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    )


def _plain(p: Tensor | None) -> bool:
    return p is None or (
        p.dtype == torch.float32 and p.is_cpu and p.is_contiguous() and (rehearsing or type(p) in PLAIN)
    )


def run(block: Block, x: Tensor, view: View) -> Tensor:
    """x (B, T, E) after the block."""
    attention, network, norm = block.attention, block.feedforward, block.attention_norm
    assert isinstance(network, FeedForward) and norm is not None and block.feedforward_norm is not None
    mask = cos = sin = None
    causal = view.mask.is_plain_causal(attention.window)
    if not causal:
        mask = view.mask.dense(attention.window)
        causal = view.mask.causal and view.mask.starts == 0
    shape = _Block(
        *x.shape, network.up.out_features, attention.n_heads, attention.n_kv_heads, attention.d_head,
        type(norm) is RMSNorm, ACTIVATIONS[network.act], network.gate is not None, causal, torch.get_num_threads(),
        attention.d_head**-0.5 if attention.scale is None else attention.scale, norm.eps,
    )  # fmt: skip
    if mask is not None:
        mask = mask.expand(-1, -1, x.shape[1], -1).contiguous()
        shape.mask_row = 0 if len(mask) == 1 else mask.stride(0)
    if view.rotation is not None:
        cos, sin = view.rotation.cos.float().contiguous(), view.rotation.sin.float().contiguous()
        shape.half, shape.turn_row = cos.shape[-1], 0 if len(cos) == 1 else cos.stride(0)
        shape.interleaved = view.rotation.layout == "interleaved"
    named = attention._modules | network._modules
    weights: list[Tensor | None] = []
    for part in (norm, block.feedforward_norm, *map(named.get, MAPS)):
        own = {} if part is None else part._parameters
        weights += own.get("weight"), own.get("bias")
    y: Tensor = _Run.apply(x.contiguous(), shape, mask, cos, sin, *weights)  # type: ignore[no-untyped-call]
    return y


# --- the two calls ---------------------------------------------------------------------------------------------------


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: _Block, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
        *weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        n_kept, n_room = _LONG(), _LONG()
        lib = library()
        assert lib is not None
        lib.block_layout(ctypes.byref(shape), ctypes.byref(n_kept), ctypes.byref(n_room))
        y, kept, room = torch.empty_like(x), x.new_empty(n_kept.value), _workspace(n_room.value)
        ctx.shape, ctx.n_room = shape, n_room.value
        ctx.save_for_backward(x, kept, mask, cos, sin, *weights)
        if not rehearsing:
            _point(shape, room, x, kept, mask, cos, sin, weights)
            shape.y = y.data_ptr()
            lib.block_forward(ctypes.byref(shape))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, kept, mask, cos, sin, *weights = ctx.saved_tensors
        shape, room, wanted = ctx.shape, _workspace(ctx.n_room), ctx.needs_input_grad[5:]
        d_y, d_x = d_y.contiguous(), torch.empty_like(x)
        found = [torch.empty_like(w) if want else None for w, want in zip(weights, wanted, strict=True)]
        if not rehearsing:
            lib = library()
            assert lib is not None
            _point(shape, room, x, kept, mask, cos, sin, weights)
            shape.gradients = _Pointers(*map(pointer, found))
            shape.d_y, shape.d_x = d_y.data_ptr(), d_x.data_ptr()
            lib.block_backward(ctypes.byref(shape))
        return d_x, None, None, None, None, *found


def _point(
    shape: _Block, room: Tensor, x: Tensor, kept: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    weights: Any,
) -> None:  # fmt: skip
    """Tell where everything lies; that holds as long as the tensors do."""
    shape.x, shape.kept, shape.room = x.data_ptr(), kept.data_ptr(), room.data_ptr()
    shape.mask, shape.cos, shape.sin = pointer(mask), pointer(cos), pointer(sin)
    shape.weights = _Pointers(*map(pointer, weights))


_mine = threading.local()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Inside, tensors have no memory (train/rehearsal.py): room is made for them, and nothing is called."""
    global rehearsing
    before, rehearsing = rehearsing, True
    real, _mine.room = getattr(_mine, "room", None), None
    try:
        yield
    finally:
        rehearsing, _mine.room = before, real


def _workspace(size: int) -> Tensor:
    """Room for one call, the same for the next: new memory costs more than what is done in it."""
    room: Tensor | None = getattr(_mine, "room", None)
    if room is None or len(room) < size:
        room = _mine.room = torch.empty(size, dtype=torch.float32)
    return room
