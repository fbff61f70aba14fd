"""`CudaStack`: the blocks of a decoder by a few Triton kernels each, for a decode step of one token per row.

B rows, E model width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heedful.kernels import options
from heedful.kernels.cuda.layers import (
    MAX_ROWS,
    DecodeBlock,
    FusedNorm,
    Product,
    UnsupportedPart,
    Where,
    rotation_table,
)
from heedful.kernels.cuda.state import GraphCache, GraphState
from heedful.kernels.modules import PackedHead
from heedful.kernels.packed import Plain
from heedful.nn.block import Block
from heedful.nn.head import LanguageHead
from heedful.nn.position import Rotary
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


class CudaStack(Stack):
    """A decoder stack that runs decode steps on a `GraphState` by the kernels, all else as it is."""

    kernels: CudaBlocks

    @classmethod
    def replace(cls, stack: Stack) -> None:
        """Turn a stack of packed blocks into this class, in place, if the kernels support all its modules."""
        if not options.has_only(stack, Stack, options.STACK) or not stack.causal or stack.bias is not None:
            return
        try:
            kernels = CudaBlocks(stack)
        except UnsupportedPart:
            return
        stack.__class__ = cls
        assert isinstance(stack, cls)
        stack.kernels = kernels

    def forward(self, x: Tensor, positions: Tensor, *, state: KeyValueState | None = None, **inputs: Any) -> Tensor:
        """x (B, T, E) -> (B, T, E); see Stack."""
        if type(state) is not GraphState or not self.kernels.supports(x) or any(v is not None for v in inputs.values()):
            return super().forward(x, positions, state=state, **inputs)
        return self.kernels(x, state)


class CudaHead(LanguageHead):
    """A language head whose logits of a few rows are one kernel; they are float32."""

    product: Product

    @classmethod
    def replace(cls, head: LanguageHead) -> None:
        """Turn a head into this class, in place, if the kernels support it."""
        try:
            product = cls._product(head)
        except UnsupportedPart:
            return
        head.__class__ = cls
        assert isinstance(head, cls)
        head.product = product

    @staticmethod
    def _product(head: LanguageHead) -> Product:
        if type(head) is PackedHead:
            return Product.of(head.packed)
        if not options.is_head(head):
            raise UnsupportedPart
        return Product.of(Plain(head.weight, None if head.bias is None else head.bias.detach()))

    def project(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., V)."""
        rows = x.numel() // x.shape[-1]
        if rows > MAX_ROWS or torch.is_grad_enabled() or not x.is_contiguous():
            packed = self._modules.get("packed")  # of a head that was packed before
            return super().project(x) if packed is None else packed(x)
        out = x.new_empty(rows, self.product.n_outputs, dtype=torch.float32)
        return self.product(x.view(rows, -1), out).view(*x.shape[:-1], -1)


def n_logits(head: nn.Module) -> int:
    """How many logits a language head gives, packed or not: fewer than the model has tokens where some are no outputs,
    as Image GPT's start token."""
    assert isinstance(head, LanguageHead)
    if isinstance(head, CudaHead):
        return head.product.n_outputs
    return head.packed.n_outputs if isinstance(head, PackedHead) else len(head.weight)


class CudaBlocks:
    """The kernels of a stack's blocks, its rotation and its last norm."""

    def __init__(self, stack: Stack) -> None:
        self.blocks = [DecodeBlock(block) for block in stack.blocks if isinstance(block, Block)]
        self.norm = FusedNorm.of(stack.norm)
        if stack.rotary is not None and (type(stack.rotary) is not Rotary or stack.rotary.switch_length is not None):
            raise UnsupportedPart
        self.rotary = stack.rotary
        self.rotation: tuple[Tensor | None, Tensor | None, bool] = None, None, False
        self.counters: dict[tuple[int, int], Tensor] = {}
        self.hooked = [hooks for m in stack.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    def supports(self, x: Tensor) -> bool:
        """Whether the kernels can compute this pass."""
        return x.shape[1] == 1 and len(x) <= MAX_ROWS and not torch.is_grad_enabled() and not any(self.hooked)

    def reserve(self, n_positions: int, device: torch.device) -> None:
        """Compute the rotation of so many positions; the graph of a step only looks it up."""
        if self.rotary is not None and (self.rotation[0] is None or len(self.rotation[0]) < n_positions):
            self.rotation = rotation_table(self.rotary, n_positions, device)

    def __call__(self, x: Tensor, state: GraphState) -> Tensor:
        """x (B, 1, E) -> (B, 1, E) after all blocks and the last norm; writes the new keys and values."""
        self.reserve(state.n_keys(1), x.device)
        where = Where(state.tables, state.device_lengths, *self.rotation, self.counters)
        stream = x[:, 0].to(torch.float32, copy=True)  # (B, E)
        for block, cache in zip(self.blocks, state.caches, strict=True):
            assert isinstance(cache, GraphCache)
            like = x.new_empty(0, block.n_kv_heads, 0, block.d_head)
            block(stream, cache.pages(like, like), where)
        out = torch.empty_like(x[:, 0])
        if self.norm.kind == "none":
            return stream.to(x.dtype)[:, None]
        self.norm.add(stream, out, residual=False)
        return out[:, None]
