"""One new token per row through a whole pile of blocks, by one call of our kernels (kernels.c).

A step of a small model is some two hundred operations on a few numbers each, and what PyTorch and Python need around
every one of them adds up to as much as the arithmetic. `fuse` describes a pile of packed blocks to the kernels once;
`Fused` then does what `Stack.forward` would, layer by layer and in the same order of sums. It steps aside (`can`) for
whatever it does not know: several tokens at once, a paged state, gradients, and anyone who watches.

    B rows, E model width, G heads of keys and values, S remembered positions, D head size
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heedful.nn import native
from heedful.nn.attention import Attention, View
from heedful.nn.block import Block
from heedful.nn.feedforward import FeedForward
from heedful.nn.native import Matrix, pointer
from heedful.nn.norm import RMSNorm
from heedful.nn.packed import Panels
from heedful.nn.state import KeyValueState
from heedful.nn.training import ACTIVATIONS

RESIDUALS = ("pre", "post", "parallel")
_LONG, _POINTER, _DOUBLE = ctypes.c_long, ctypes.c_void_p, ctypes.c_double


class _Norm(ctypes.Structure):
    _fields_ = (("kind", _LONG), ("size", _LONG), ("weight", _POINTER), ("bias", _POINTER), ("eps", _DOUBLE))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("residual", "act", "gated", "window", "n_heads", "n_groups", "size")),
        ("scale", _DOUBLE), ("cross_scale", _DOUBLE),
        *((name, _Norm) for name in (
            "attention_norm", "attention_after", "cross_norm", "feedforward_norm", "feedforward_after", "query_norm",
            "key_norm",
        )),
        *((name, Matrix) for name in ("joint", "output", "cross_query", "cross_output", "up", "down")),
    )  # fmt: skip


class _Remembered(ctypes.Structure):
    _fields_ = (
        ("keys", _POINTER), ("values", _POINTER), ("row", _LONG), ("head", _LONG), ("cross_keys", _POINTER),
        ("cross_values", _POINTER), ("cross_row", _LONG), ("cross_head", _LONG), ("cross_key", _LONG),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("n_rows", _LONG), ("width", _LONG), ("lengths", _POINTER), ("cos", _POINTER), ("sin", _POINTER),
        ("half", _LONG), ("turn_row", _LONG), ("interleaved", _LONG), ("bias", _POINTER), ("bias_row", _LONG),
        ("bias_head", _LONG), ("n_memory", _POINTER),
    )  # fmt: skip


class Unknown(Exception):
    """A part that the kernels do not have."""


def fuse(blocks: Sequence[Block]) -> Fused | None:
    """These blocks as one, or None where some part is not packed for our kernels or not known to them."""
    try:
        return Fused(blocks)
    except Unknown:
        return None


class Fused:
    def __init__(self, blocks: Sequence[Block]) -> None:
        self.kept: list[Tensor] = []  # what the kernels read and nobody else keeps
        self.layers = (_Layer * len(blocks))(*[self._layer(block) for block in blocks])
        modules = [m for block in blocks for m in block.modules()]
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.watches = [m.watch for m in modules if isinstance(m, Attention)]
        self.cross = blocks[0].cross is not None

    def can(self, x: Tensor, state: KeyValueState | None) -> bool:
        """Whether this step is one for the kernels."""
        return (
            x.shape[1] == 1
            and state is not None
            and type(state) is KeyValueState
            and x.dtype == torch.float32
            and not torch.is_grad_enabled()
            and not any(self.hooks)
            and not any([watch.on for watch in self.watches])
            and (not self.cross or not state.cross[0].empty)
        )

    def __call__(self, x: Tensor, view: View, state: KeyValueState) -> Tensor:
        """x (B, 1, E) after all blocks; the state has room for and holds the new keys and values."""
        n_rows, _, width = x.shape
        out = x.clone(memory_format=torch.contiguous_format)
        lengths = (_LONG * n_rows)(*state.lengths)
        step = _Step(n_rows, width, ctypes.addressof(lengths))
        kept: list[Any] = [lengths]
        if view.rotation is not None:
            cos, sin = (t.float().contiguous() for t in (view.rotation.cos, view.rotation.sin))
            step.cos, step.sin, step.half = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            step.turn_row = 0 if len(cos) == 1 else cos.shape[-1]
            step.interleaved = view.rotation.layout == "interleaved"
            kept += [cos, sin]
        if view.bias is not None:
            bias = view.bias.contiguous()
            step.bias = bias.data_ptr()
            step.bias_row, step.bias_head = (bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1))
            kept.append(bias)
        if self.cross:
            n_memory = state.cross[0].keys.shape[2]
            counts = [n_memory] * n_rows if state.memory_lengths is None else state.memory_lengths.tolist()
            memory = (_LONG * n_rows)(*counts)
            step.n_memory = ctypes.addressof(memory)
            kept.append(memory)
        remembered = (_Remembered * len(self.layers))(*self._remembered(state, n_rows, kept))
        lib = native.library()
        assert lib is not None
        threads = torch.get_num_threads()
        at = out.data_ptr()
        if not lib.decode(self.layers, len(self.layers), remembered, ctypes.byref(step), at, threads):
            raise MemoryError(f"no memory for a step of {n_rows} rows")
        return out

    def _remembered(self, state: KeyValueState, n_rows: int, kept: list[Any]) -> list[_Remembered]:
        end, found = state.n_keys(1), []
        for i, (layer, cache) in enumerate(zip(self.layers, state.caches, strict=True)):
            keys, values = cache.room(n_rows, end, layer.n_groups, layer.size)
            one = _Remembered(keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1))
            if self.cross:
                k, v = (t.contiguous() for t in (state.cross[i].keys, state.cross[i].values))
                one.cross_keys, one.cross_values = k.data_ptr(), v.data_ptr()
                one.cross_row, one.cross_head, one.cross_key = k.stride()[:3]
                kept += [k, v]
            found.append(one)
        return found

    def _layer(self, block: Block) -> _Layer:
        attention, cross, forward = block.attention, block.cross, block.feedforward
        if not isinstance(forward, FeedForward) or forward.act not in ACTIVATIONS:
            raise Unknown
        layer = _Layer()
        layer.residual, layer.act = RESIDUALS.index(block.residual), ACTIVATIONS[forward.act]
        layer.gated, layer.window = forward.joint is not None, attention.window or 0
        layer.n_heads, layer.n_groups, layer.size = attention.n_heads, attention.n_kv_heads, attention.d_head
        layer.scale = self._scale(attention)
        layer.joint, layer.output = self._matrix(attention.joint), self._matrix(attention.output)
        layer.up = self._matrix(forward.joint or forward.up)
        layer.down = self._matrix(forward.down)
        if cross is not None:
            if (cross.n_heads, cross.n_kv_heads, cross.d_head) != (
                attention.n_heads, attention.n_kv_heads, attention.d_head
            ) or cross.query_norm is not None or cross.window is not None:  # fmt: skip
                raise Unknown
            layer.cross_scale, layer.cross_query = self._scale(cross), self._matrix(cross.query)
            layer.cross_output = self._matrix(cross.output)
        for name in ("attention_norm", "cross_norm", "feedforward_norm"):
            setattr(layer, name, self._norm(getattr(block, name)))
        if block.residual != "parallel":
            layer.attention_after = self._norm(block.attention_after)
            layer.feedforward_after = self._norm(block.feedforward_after)
        layer.query_norm, layer.key_norm = self._norm(attention.query_norm), self._norm(attention.key_norm)
        return layer

    @staticmethod
    def _scale(attention: Attention) -> float:
        if attention.softcap is not None or attention.d_head % 16:
            raise Unknown
        return float(attention.d_head**-0.5 if attention.scale is None else attention.scale)

    @staticmethod
    def _matrix(packed: nn.Module | None) -> Matrix:
        if not isinstance(packed, Panels):
            raise Unknown
        return packed.matrix

    def _norm(self, norm: nn.Module | None) -> _Norm:
        if norm is None:
            return _Norm()
        if type(norm) is RMSNorm:
            weight = (norm.weight.detach() + norm.offset).float().contiguous()
            self.kept.append(weight)
            return _Norm(2, len(weight), weight.data_ptr(), None, norm.eps)
        if type(norm) is nn.LayerNorm and norm.weight is not None:
            self.kept += [t.detach() for t in (norm.weight, norm.bias) if t is not None]
            return _Norm(1, len(norm.weight), norm.weight.data_ptr(), pointer(norm.bias), norm.eps)
        raise Unknown
