"""New tokens, one or several per row, through a whole pile of blocks by one call of our kernels (decode_op.py).

A step of a small model is some two hundred operations on a few numbers each, and what PyTorch and Python need around
every one of them adds up to as much as the arithmetic. `fuse` describes a pile of packed blocks to the kernels once;
`Fused` then does what `Stack.forward` would, layer by layer. To the kernels tokens are a list, each with its row and
place: rows may have one token or hundreds, padding is left out, and a token's result is the same to the last bit
however a text is cut and whatever is beside it. Rows are tables of blocks; a contiguous row is a single one.

It steps aside (`can`) for whatever it does not know: other states, gradients, and anyone who watches.

    B rows, T tokens of each, M of all that are real, E model width, H heads, S positions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heedful.kernels.cpu.block import ACTIVATIONS
from heedful.kernels.cpu.decode_op import SINGLE_BLOCK, DecodeLayer, DecodeStep, LayerCache, NormWeights, decode
from heedful.kernels.cpu.library import pointer
from heedful.kernels.cpu.linear import PackedMatrix
from heedful.kernels.cpu.structs import LONG
from heedful.kernels.packed import Panels
from heedful.nn.attention import Attention, View
from heedful.nn.block import Block
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.paged import PagedState
from heedful.nn.state import KeyValueState

RESIDUALS = ("pre", "post", "parallel")


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
        self.layers = (DecodeLayer * len(blocks))(*[self._layer(block) for block in blocks])
        modules = [m for block in blocks for m in block.modules()]
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.watches = [m.watch for m in modules if isinstance(m, Attention)]
        self.cross = blocks[0].cross is not None

    def can(self, x: Tensor, state: KeyValueState | None) -> bool:
        """Whether this step is one for the kernels."""
        return (
            state is not None
            and type(state) in (KeyValueState, PagedState)
            and x.dtype == torch.float32
            and not torch.is_grad_enabled()
            and not any(self.hooks)
            and not any([watch.on for watch in self.watches])
            and (not self.cross or not state.cross[0].empty)
        )

    def __call__(self, x: Tensor, view: View, state: KeyValueState) -> Tensor:
        """x (B, T, E) after all blocks; the state has room for and holds the new keys and values. Padding stays as it
        is, and nothing is kept of it."""
        (n_rows, n, width), flat = x.shape, x.flatten(0, 1)
        rows, positions, real = self._tokens(state, n)
        step = DecodeStep(len(rows), width)
        kept: list[Any] = []  # what is pointed to
        out = flat.clone(memory_format=torch.contiguous_format) if real is None else flat[real]  # (M, E)
        if view.rotation is not None:
            cos, sin = (self._each(t[:, 0], x, real) for t in (view.rotation.cos, view.rotation.sin))
            step.cos, step.sin, step.n_rotated_pairs = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            step.rotation_stride = 0 if len(cos) == 1 else cos.shape[-1]
            step.interleaved = view.rotation.layout == "interleaved"
            kept += [cos, sin]
        if view.bias is not None:
            bias = self._each(view.bias.transpose(1, 2), x, real)  # (M or 1, H or 1, S)
            step.bias = bias.data_ptr()
            step.bias_token_stride, step.bias_head_stride = (bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1))
            kept.append(bias)
        memory = None
        if self.cross:
            n_memory, lengths = state.cross[0].keys.shape[2], state.memory_lengths
            each = [n_memory] * n_rows if lengths is None else lengths.tolist()
            memory = (LONG * len(rows))(*[each[row] for row in rows])
        tables, step.block_size, step.clear_blocks = self._tables(state, n)
        step.block_tables, step.max_blocks = tables.data_ptr(), tables.shape[1]
        kept.append(tables)
        caches = (LayerCache * len(self.layers))(*self._caches(state, n_rows, n, kept))
        decode(self.layers, caches, step, (LONG * len(rows))(*rows), (LONG * len(rows))(*positions), memory, out)
        if real is not None:
            out = flat.index_copy(0, real, out)
        return out.view(x.shape)

    @staticmethod
    def _each(given: Tensor, x: Tensor, real: Tensor | None) -> Tensor:
        """(B or 1, T, ...) for each token of x that is real: (M or 1, ...)."""
        if x.shape[1] > 1:
            given = given.expand(len(x), *given.shape[1:])
        flat = given.flatten(0, 1).float()
        return flat.contiguous() if real is None else flat[real]

    @staticmethod
    def _tokens(state: KeyValueState, n: int) -> tuple[list[int], list[int], Tensor | None]:
        """Row and place of every token of a pass of n for each row, and which of all are real where some are not."""
        if n == 1:
            return list(range(state.n_rows)), state.lengths, None
        counts = [n] * state.n_rows if state.real is None else state.real
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        places = [at + i for at, count in zip(state.lengths, counts, strict=True) for i in range(count)]
        if state.real is None:
            return rows, places, None
        return rows, places, torch.tensor([r * n + i for r, count in enumerate(counts) for i in range(count)])

    @staticmethod
    def _tables(state: KeyValueState, n: int) -> tuple[Tensor, int, bool]:
        """Every row's blocks (B, wide), how many positions are in one, and whether new ones hold something old."""
        if isinstance(state, PagedState):
            return state.table(n), state.pool.block, True
        return torch.arange(state.n_rows)[:, None], SINGLE_BLOCK, False

    def _caches(self, state: KeyValueState, n_rows: int, n: int, kept: list[Any]) -> list[LayerCache]:
        end, found = state.longest(n), []
        for i, (layer, cache) in enumerate(zip(self.layers, state.caches, strict=True)):
            keys, values = cache.room(n_rows, end, layer.n_kv_heads, layer.d_head)
            one = LayerCache(keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1))
            if self.cross:
                k, v = (t.contiguous() for t in (state.cross[i].keys, state.cross[i].values))
                one.cross_keys, one.cross_values = k.data_ptr(), v.data_ptr()
                one.cross_row_stride, one.cross_head_stride, one.cross_position_stride = k.stride()[:3]
                kept += [k, v]
            found.append(one)
        return found

    def _layer(self, block: Block) -> DecodeLayer:
        attention, cross, forward = block.attention, block.cross, block.feedforward
        if not isinstance(forward, FeedForward) or forward.act not in ACTIVATIONS:
            raise Unknown
        layer = DecodeLayer()
        layer.residual, layer.activation = RESIDUALS.index(block.residual), ACTIVATIONS[forward.act]
        layer.gated, layer.window = forward.joint is not None, attention.window or 0
        layer.n_heads, layer.n_kv_heads, layer.d_head = attention.n_heads, attention.n_kv_heads, attention.d_head
        layer.scale = self._scale(attention)
        layer.qkv, layer.output = self._matrix(attention.joint), self._matrix(attention.output)
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
            layer.attention_post_norm = self._norm(block.attention_after)
            layer.feedforward_post_norm = self._norm(block.feedforward_after)
        layer.query_norm, layer.key_norm = self._norm(attention.query_norm), self._norm(attention.key_norm)
        return layer

    @staticmethod
    def _scale(attention: Attention) -> float:
        if attention.softcap is not None or attention.d_head % 16:
            raise Unknown
        return float(attention.d_head**-0.5 if attention.scale is None else attention.scale)

    @staticmethod
    def _matrix(packed: nn.Module | None) -> PackedMatrix:
        if not isinstance(packed, Panels):
            raise Unknown
        return packed.matrix

    def _norm(self, norm: nn.Module | None) -> NormWeights:
        if norm is None:
            return NormWeights()
        if type(norm) is RMSNorm:
            weight = (norm.weight.detach() + norm.offset).float().contiguous()
            self.kept.append(weight)
            return NormWeights(2, len(weight), weight.data_ptr(), None, norm.eps)
        if type(norm) is nn.LayerNorm and norm.weight is not None:
            self.kept += [t.detach() for t in (norm.weight, norm.bias) if t is not None]
            return NormWeights(1, len(norm.weight), norm.weight.data_ptr(), pointer(norm.bias), norm.eps)
        raise Unknown
