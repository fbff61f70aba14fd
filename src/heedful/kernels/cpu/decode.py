"""All blocks of a decoder by one call of the C library (decode_op.py), for prefill and decode steps on a CPU.

A decode step of a small model is some two hundred small operators, whose overhead in PyTorch and Python is as large as
the arithmetic. `KernelStack` describes its packed blocks to the library once and then computes the same as
`Stack.run_blocks`. Tokens are a flat list, each with its row and position: rows may have one token or hundreds, padding
is left out, and a token's result is bitwise the same however the prompt is chunked and whatever else is in the batch.
Rows are block tables; a contiguous cache is a single block.

It falls back to the plain stack for what the library does not support: other states, gradients, hooks, modules with
options that are not listed here.

    B rows, T tokens of each, M of all that are real, E model width, H heads, S positions
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from heedful.kernels import options
from heedful.kernels.cpu.block import ACTIVATIONS
from heedful.kernels.cpu.decode_op import SINGLE_BLOCK, DecodeLayer, DecodeStep, LayerCache, NormWeights, decode
from heedful.kernels.cpu.library import pointer
from heedful.kernels.cpu.linear import PackedMatrix
from heedful.kernels.cpu.structs import INT64
from heedful.kernels.modules import PackedAttention, PackedFeedForward
from heedful.kernels.packed import Panels
from heedful.nn.attention import Attention, AttentionInfo
from heedful.nn.block import Block, ParallelBlock, PostNormBlock, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState

RESIDUALS: tuple[type[Block], ...] = (PreNormBlock, PostNormBlock, ParallelBlock)  # numbered as in C
KINDS = {torch.float32: 0, torch.int8: 3}  # of a KV cache, numbered as in C


def byte_strides(x: Tensor) -> tuple[int, int, int]:
    """Bytes between the rows or blocks, the heads and the positions of a cache (N, G, P, D)."""
    rows, heads, positions, _ = (stride * x.element_size() for stride in x.stride())
    return rows, heads, positions


class UnsupportedModule(Exception):
    """A module that the library does not support, or one with an option that it does not."""


class KernelStack(Stack):
    """A decoder stack that runs its blocks by one call of the library where it can (`DecodeBlocks.supports`)."""

    decoder: DecodeBlocks

    @classmethod
    def replace(cls, stack: Stack) -> None:
        """Turn a stack of packed blocks into this class, in place, if the library supports all its modules."""
        if not options.has_only(stack, Stack, options.STACK) or not stack.causal:
            return
        try:
            decoder = DecodeBlocks([block for block in stack.blocks if isinstance(block, Block)], stack.norm)
        except UnsupportedModule:
            return
        stack.__class__ = cls
        assert isinstance(stack, cls)
        stack.decoder = decoder

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        state: KeyValueState | None = None,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        **memory: Tensor | None,
    ) -> Tensor:
        """x (B, T, E) -> (B, T, E); see Stack."""
        if state is not None:
            info = self._info(x, positions, state, lengths, documents)
            if self.decoder.supports(x, info, state):
                return self.decoder(x, info, state)
        return super().forward(x, positions, state=state, lengths=lengths, documents=documents, **memory)


class DecodeBlocks:
    """Packed blocks and the last norm as structs of the C library, and the call."""

    def __init__(self, blocks: Sequence[Block], norm: nn.Module | None) -> None:
        self.tensors: list[Tensor] = []  # referenced by the structs only: kept alive here
        self.layers = (DecodeLayer * len(blocks))(*[self._layer(block) for block in blocks])
        self.head_sizes = [(block.attention.n_kv_heads, block.attention.d_head) for block in blocks]
        self.norm = self._norm(norm)
        # The structs of a state or pool, with the tensors that they point to.
        self.known: WeakKeyDictionary[KeyValueState | BlockPool, tuple[list[Tensor], Any]] = WeakKeyDictionary()
        modules = [m for part in (*blocks, *([] if norm is None else [norm])) for m in part.modules()]
        self.watches = [m.watch for m in modules if isinstance(m, Attention)]
        unused = {m for watch in self.watches for m in watch.modules()}  # called only while its watch is on
        called = [m for m in modules if m not in unused]
        self.hooks = [hooks for m in called for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.cross = blocks[0].cross is not None

    def supports(self, x: Tensor, info: AttentionInfo, state: KeyValueState) -> bool:
        """Whether the library can compute this pass."""
        return (
            type(state) in (KeyValueState, PagedState)
            and x.dtype == torch.float32
            and not torch.is_grad_enabled()
            and not any(self.hooks)
            and not any([watch.on for watch in self.watches])
            and options.is_info(info)
            and info.mask.documents is None
            and (not self.cross or not state.cross[0].empty)
        )

    def __call__(self, x: Tensor, info: AttentionInfo, state: KeyValueState) -> Tensor:
        """x (B, T, E) -> (B, T, E) after all blocks and the last norm; new keys and values are written to the state,
        but `lengths` is not changed. Padding is returned unchanged and not cached."""
        (n_rows, n, width), flat = x.shape, x.flatten(0, 1)
        counts = [n] * n_rows if info.counts is None or n == 1 else info.counts
        rows, positions, real = self._tokens(state, n, counts)
        step = DecodeStep(len(rows), width, norm=self.norm)
        pointed_to: list[Any] = []  # kept alive during the call
        out = flat.clone(memory_format=torch.contiguous_format) if real is None else flat[real]  # (M, E)
        self._set_positions(step, x, info, real, pointed_to)
        memory = None
        if self.cross:
            n_memory, lengths = state.cross[0].keys.shape[2], state.memory_lengths
            each = [n_memory] * n_rows if lengths is None else lengths.tolist()
            memory = (INT64 * len(rows))(*[each[row] for row in rows])
        tables, step.block_size, step.clear_blocks = self._tables(state, counts)
        step.block_tables, step.max_blocks = tables.data_ptr(), tables.shape[1]
        caches = self._caches(state, counts, pointed_to)
        decode(self.layers, caches, step, (INT64 * len(rows))(*rows), (INT64 * len(rows))(*positions), memory, out)
        if real is not None:
            out = flat.index_copy(0, real, out)
        return out.view(x.shape)

    def _set_positions(
        self, step: DecodeStep, x: Tensor, info: AttentionInfo, real: Tensor | None, pointed_to: list[Any]
    ) -> None:
        """Set the rotation and attention bias of each token."""
        if info.rotation is not None:
            cos, sin = (self._per_token(t[:, 0], x, real) for t in (info.rotation.cos, info.rotation.sin))
            step.cos, step.sin, step.n_rotated_pairs = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            step.rotation_stride = 0 if len(cos) == 1 else cos.shape[-1]
            step.interleaved = info.rotation.layout == "interleaved"
            pointed_to += [cos, sin]
        if info.bias is not None:
            bias = self._per_token(info.bias.transpose(1, 2), x, real)  # (M or 1, H or 1, S)
            step.bias = bias.data_ptr()
            step.bias_token_stride, step.bias_head_stride = (bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1))
            pointed_to.append(bias)

    @staticmethod
    def _per_token(given: Tensor, x: Tensor, real: Tensor | None) -> Tensor:
        """(B or 1, T, ...) -> (M or 1, ...), for the real tokens of x."""
        if x.shape[1] > 1:
            given = given.expand(len(x), *given.shape[1:])
        flat = given.flatten(0, 1).float()
        return flat.contiguous() if real is None else flat[real]

    @staticmethod
    def _tokens(state: KeyValueState, n: int, counts: list[int]) -> tuple[list[int], list[int], Tensor | None]:
        """Rows and positions of the real tokens of a pass with n per row; their indices (M,) if there is padding."""
        if n == 1:
            return list(range(state.n_rows)), state.lengths, None
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        positions = [at + i for at, count in zip(state.lengths, counts, strict=True) for i in range(count)]
        if len(rows) == n * state.n_rows:
            return rows, positions, None
        return rows, positions, torch.tensor([r * n + i for r, count in enumerate(counts) for i in range(count)])

    @staticmethod
    def _tables(state: KeyValueState, counts: list[int]) -> tuple[Tensor, int, bool]:
        """Block tables (B, blocks), block size, and whether new blocks must be zeroed."""
        if isinstance(state, PagedState):
            return state.block_table(counts), state.pool.block_size, True
        return torch.arange(state.n_rows)[:, None], SINGLE_BLOCK, False

    def _caches(self, state: KeyValueState, counts: list[int], pointed_to: list[Any]) -> Any:
        """The layers' caches as an array of structs, made anew where the state's tensors are others than before."""
        end = max(at + count for at, count in zip(state.lengths, counts, strict=True))
        n_rows, layers = state.n_rows, zip(state.caches, self.head_sizes, strict=True)
        tensors = [t for cache, sizes in layers for t in cache.reserve(n_rows, end, *sizes)]
        owner = state.pool if isinstance(state, PagedState) else state
        before, structs = self.known.get(owner, ([], None))
        if len(before) != len(tensors) or not all(map(is_, before, tensors)):
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            each = [LayerCache(KINDS[k.dtype], k.data_ptr(), v.data_ptr(), *byte_strides(k)) for k, v in pairs]
            structs = (LayerCache * len(each))(*each)
            self.known[owner] = tensors, structs
        for struct, cross in zip(structs, state.cross, strict=False):
            k, v = (t.contiguous() for t in (cross.keys, cross.values))
            struct.cross_keys, struct.cross_values = k.data_ptr(), v.data_ptr()
            struct.cross_row_stride, struct.cross_head_stride, struct.cross_position_stride = byte_strides(k)
            pointed_to += [k, v]
        return structs

    def _layer(self, block: Block) -> DecodeLayer:
        attention, cross, network = block.attention, block.cross, block.feedforward
        if type(block) not in RESIDUALS or not options.has_only(block, type(block), options.BLOCK | {"shares_norm"}):
            raise UnsupportedModule
        layer = DecodeLayer()
        layer.residual = RESIDUALS.index(type(block))
        layer.window = attention.window or 0
        layer.n_heads, layer.n_kv_heads, layer.d_head = attention.n_heads, attention.n_kv_heads, attention.d_head
        if not options.has_only(attention, PackedAttention, (options.ATTENTION | {"joint"}) - {"softcap"}):
            raise UnsupportedModule
        layer.scale = self._scale(attention)
        assert isinstance(attention, PackedAttention)
        layer.qkv, layer.output = self._matrix(attention.joint), self._matrix(attention.output)
        self._set_feedforward(layer, network)
        if cross is not None:
            self._set_cross(layer, attention, cross)
        for name in ("attention_norm", "cross_norm", "feedforward_norm"):
            setattr(layer, name, self._norm(getattr(block, name)))
        after = block.attention_after, block.feedforward_after
        if any(type(norm) is not nn.Identity for norm in after) and not isinstance(block, PreNormBlock):
            raise UnsupportedModule
        layer.attention_post_norm, layer.feedforward_post_norm = map(self._norm, after)
        layer.query_norm, layer.key_norm = self._norm(attention.query_norm), self._norm(attention.key_norm)
        return layer

    def _set_feedforward(self, layer: DecodeLayer, network: nn.Module) -> None:
        gated = options.has_only(network, PackedFeedForward, (options.FEEDFORWARD | {"joint"}) - {"gate", "up"})
        if not gated and not options.has_only(network, FeedForward, options.FEEDFORWARD - {"gate"}):
            raise UnsupportedModule
        assert isinstance(network, FeedForward)
        if network.act not in ACTIVATIONS:
            raise UnsupportedModule
        layer.gated, layer.activation = gated, ACTIVATIONS[network.act]
        layer.up = self._matrix(network.joint if isinstance(network, PackedFeedForward) else network.up)
        layer.down = self._matrix(network.down)

    def _set_cross(self, layer: DecodeLayer, attention: Attention, cross: Attention) -> None:
        """Cross-attention; it must have the head sizes of self-attention, and no norms or window."""
        sizes = [(a.n_heads, a.n_kv_heads, a.d_head) for a in (attention, cross)]
        known = options.PROJECTIONS | options.SHAPE - {"softcap", "window"}
        if not options.has_only(cross, Attention, known) or sizes[0] != sizes[1]:
            raise UnsupportedModule
        layer.cross_scale, layer.cross_query = self._scale(cross), self._matrix(cross.query)
        layer.cross_output = self._matrix(cross.output)

    @staticmethod
    def _scale(attention: Attention) -> float:
        if attention.d_head % 16:
            raise UnsupportedModule
        return float(attention.d_head**-0.5 if attention.scale is None else attention.scale)

    @staticmethod
    def _matrix(packed: nn.Module | None) -> PackedMatrix:
        if not isinstance(packed, Panels):
            raise UnsupportedModule
        return packed.matrix

    def _norm(self, norm: nn.Module | None) -> NormWeights:
        if norm is None or type(norm) is nn.Identity:
            return NormWeights()
        if not options.is_norm(norm):
            raise UnsupportedModule
        if isinstance(norm, RMSNorm):
            weight = (norm.weight.detach() + norm.offset).float().contiguous()
            self.tensors.append(weight)
            return NormWeights(2, len(weight), weight.data_ptr(), None, norm.eps)
        assert isinstance(norm, nn.LayerNorm)
        self.tensors += [t.detach() for t in (norm.weight, norm.bias) if t is not None]
        return NormWeights(1, len(norm.weight), norm.weight.data_ptr(), pointer(norm.bias), norm.eps)
