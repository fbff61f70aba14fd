"""What a decode step on a GPU needs of a packed decoder's blocks, and the launches of its kernels.

A block is five launches: norm and projections, attention, output projection, norm and up (with gate and activation),
down; each sum into the residual stream, which is float32, is part of the launch before it.

    B rows, E model width, H heads, G key/value heads, D head size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from heedful.kernels import options
from heedful.kernels.cuda.triton_attention import paged_attention
from heedful.kernels.cuda.triton_linear import norm_rows, rows_linear, vector_linear
from heedful.kernels.modules import PackedAttention, PackedFeedForward
from heedful.kernels.packed import Int4, Int8, Packed, Plain
from heedful.nn.attention import Attention
from heedful.nn.block import Block, ParallelBlock, PreNormBlock
from heedful.nn.feedforward import FeedForward, gelu_tanh, quick_gelu
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Rotary

ACTIVATIONS: dict[Callable[[Tensor], Tensor], str] = {
    F.relu: "relu", F.gelu: "gelu", gelu_tanh: "gelu_tanh", quick_gelu: "quick_gelu", F.silu: "silu",
}  # fmt: skip
MAX_ROWS = 64  # more rows are better served by cuBLAS
DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch_options(n_rows: int) -> dict[str, Any]:
    """Programmatic dependent launch for one row, where the GPU has it (Hopper and later); it slows down more rows."""
    early = n_rows == 1 and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


class UnsupportedPart(Exception):
    """A module that the kernels do not support, or one with an option that they do not."""


@dataclass(frozen=True)
class FusedNorm:
    """A LayerNorm or RMSNorm; `kind` is "none" where there is none."""

    kind: str = "none"
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0

    @classmethod
    def of(cls, norm: nn.Module | None) -> FusedNorm:
        """Those of a module; UnsupportedPart if it is no norm that the kernels know."""
        if norm is None or type(norm) is nn.Identity:
            return cls()
        if not options.is_norm(norm):
            raise UnsupportedPart
        if isinstance(norm, RMSNorm):
            return cls("rms", norm.weight.detach(), None, norm.eps, norm.offset)
        assert isinstance(norm, nn.LayerNorm)
        bias = None if norm.bias is None else norm.bias.detach()
        return cls("layer", norm.weight.detach(), bias, norm.eps)

    def add(self, x: Tensor, out: Tensor, *, residual: bool) -> None:
        """out = norm(x), or with `residual` out += norm(x); both (B, E)."""
        width = x.shape[1]
        norm_rows[(len(x),)](
            x, self.weight, self.bias, out, self.eps, K=width, K_PADDED=triton.next_power_of_2(width), NORM=self.kind,
            OFFSET=self.offset, NORM_BIAS=self.bias is not None, RESIDUAL=residual, num_warps=4,
            **launch_options(len(x)),
        )  # fmt: skip


@dataclass(frozen=True)
class Product:
    """A packed linear layer: out = act(norm(x) Wᵀ + b), gated or not."""

    weight: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    bits: int
    n_outputs: int
    n_inputs: int
    norm: FusedNorm
    act: str = "none"
    gated: bool = False

    @classmethod
    def of(
        cls, packed: nn.Module | None, norm: FusedNorm | None = None, act: str = "none", gated: bool = False
    ) -> Product:
        """That of a packed layer; UnsupportedPart if the kernels do not know its form."""
        norm = norm or FusedNorm()
        if type(packed) is Plain:
            bits, scales, zeros = 16, None, None
        elif isinstance(packed, Int8) and packed.n_inputs % 32 == 0:
            bits, scales, zeros = 8, packed.scales, None
        elif isinstance(packed, Int4):
            bits, scales, zeros = 4, packed.scale, packed.zero
        else:
            raise UnsupportedPart
        assert isinstance(packed, Packed)
        n = packed.n_outputs // 2 if gated else packed.n_outputs
        weight = packed.weight
        assert isinstance(weight, Tensor)
        return cls(weight.contiguous(), scales, zeros, packed.bias, bits, n, packed.n_inputs, norm, act, gated)

    def __call__(self, x: Tensor, out: Tensor, *, residual: bool = False) -> Tensor:
        """out (B, N) from x (B, K), or added to it."""
        norm, n_rows = self.norm, len(out)
        common: dict[str, Any] = {
            "K": self.n_inputs, "ACT": self.act, "GATED": self.gated, "HAS_BIAS": self.bias is not None,
            "RESIDUAL": residual, "BITS": self.bits, **launch_options(n_rows),
        }  # fmt: skip
        weights = self.weight, self.scales, self.zeros, self.bias
        if n_rows == 1:
            block_n, block_k, warps = vector_blocks(self.n_outputs, self.n_inputs, self.gated)
            vector_linear[(triton.cdiv(self.n_outputs, block_n),)](
                x, *weights, norm.weight, norm.bias, out, self.n_outputs, norm.eps, **common,
                NORM=norm.kind, OFFSET=norm.offset, NORM_BIAS=norm.bias is not None,
                K_PADDED=triton.next_power_of_2(self.n_inputs), BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
            )  # fmt: skip
            return out
        dtype = self.weight.dtype if self.bits == 16 else torch.bfloat16
        if norm.kind != "none":
            normed = torch.empty_like(x, dtype=dtype)
            norm.add(x, normed, residual=False)
            x = normed
        rows = max(16, triton.next_power_of_2(n_rows))
        block_n, block_k, warps, stages = rows_blocks(self.n_outputs, rows, dtype)
        rows_linear[(triton.cdiv(self.n_outputs, block_n),)](
            x, *weights, out, n_rows, self.n_outputs, **common, DOT=DOT[dtype], ROWS=rows, BLOCK_N=block_n,
            BLOCK_K=block_k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out


def vector_blocks(n_outputs: int, n_inputs: int, gated: bool) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and warps, for one row; at least two programs per multiprocessor of an H200."""
    block_k = min(4096, triton.next_power_of_2(n_inputs))
    most = {1024: 4, 2048: 8, 4096: 2}.get(block_k, 8)
    block_n = min(most, max(1, triton.next_power_of_2(n_outputs // 264 + 1) // 2))
    return (max(1, block_n // 2) if gated else block_n), block_k, 8 if block_k > 2048 else 4


def rows_blocks(n_outputs: int, rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Outputs and inputs of a tile, warps, and tiles fetched ahead, for several rows."""
    return 16, 64 if dtype == torch.float32 else 128, 2, 4


def attention_splits(n_heads: int) -> int:
    """Programs for each key/value head of all rows: a few alone would keep few multiprocessors busy."""
    return min(8, max(1, 1024 // triton.next_power_of_2(n_heads)))


class DecodeBlock:
    """One block: its weights, and its five launches for one token per row."""

    def __init__(self, block: Block) -> None:
        attention, network = block.attention, block.feedforward
        known = (options.ATTENTION | {"joint"}) - {"query", "key", "value"}
        if type(block) not in (PreNormBlock, ParallelBlock) or block.cross is not None:
            raise UnsupportedPart
        extra = {"shares_norm"} if isinstance(block, ParallelBlock) else set()
        if not options.has_only(block, type(block), options.BLOCK | extra):
            raise UnsupportedPart
        if not options.has_only(attention, PackedAttention, known):
            raise UnsupportedPart
        assert isinstance(attention, PackedAttention)
        self.parallel = isinstance(block, ParallelBlock)
        first = FusedNorm.of(block.attention_norm)
        second = first if self.parallel and block.shares_norm else FusedNorm.of(block.feedforward_norm)
        self.after = FusedNorm.of(block.attention_after), FusedNorm.of(block.feedforward_after)
        self.joint, self.output = Product.of(attention.joint, first), Product.of(attention.output)
        self._set_feedforward(network, second)
        self._set_attention(attention)

    def _set_feedforward(self, network: nn.Module, norm: FusedNorm) -> None:
        gated = options.has_only(network, PackedFeedForward, (options.FEEDFORWARD | {"joint"}) - {"gate", "up"})
        if not gated and not options.has_only(network, FeedForward, options.FEEDFORWARD - {"gate"}):
            raise UnsupportedPart
        assert isinstance(network, FeedForward)
        if network.act not in ACTIVATIONS:
            raise UnsupportedPart
        first = network.joint if isinstance(network, PackedFeedForward) else network.up
        self.up = Product.of(first, norm, ACTIVATIONS[network.act], gated)
        self.down = Product.of(network.down)

    def _set_attention(self, attention: Attention) -> None:
        self.n_heads, self.n_kv_heads, self.d_head = attention.n_heads, attention.n_kv_heads, attention.d_head
        self.scale = float(self.d_head**-0.5 if attention.scale is None else attention.scale)
        self.window, self.softcap = attention.window or 2**30, attention.softcap or 0.0
        norms = FusedNorm.of(attention.query_norm), FusedNorm.of(attention.key_norm)
        widths = {len(norm.weight) for norm in norms if norm.weight is not None}
        if widths - {self.d_head} or norms[0].kind != norms[1].kind or any(norm.offset for norm in norms):
            raise UnsupportedPart  # OLMo 2 normalizes all heads together
        self.query_norm, self.key_norm = norms

    def attend(self, qkv: Tensor, cache: tuple[Tensor, Tensor], where: Where, out: Tensor) -> None:
        """Attention of the projections (B, (H + 2 G) D) to the cache, which it extends: out (B, H D)."""
        (keys, values), n_rows = cache, len(qkv)
        groups = max(16, triton.next_power_of_2(self.n_heads // self.n_kv_heads))
        padded = max(16, triton.next_power_of_2(self.d_head))
        n = attention_splits(n_rows * self.n_kv_heads)
        parts, sums, arrived = where.memory(n_rows, self.n_heads, self.n_kv_heads, n, self.d_head)
        half = 0 if where.cos is None else where.cos.shape[-1]
        paged_attention[(n_rows, self.n_kv_heads, n)](
            qkv, keys, values, where.tables, where.lengths, where.cos, where.sin, self.query_norm.weight,
            self.key_norm.weight, out, parts, sums[0], sums[1], arrived, self.scale, self.softcap,
            self.query_norm.eps, self.window, where.tables.shape[1], H=self.n_heads, G=self.n_kv_heads, D=self.d_head,
            D_PADDED=padded, GROUPS=groups, P=keys.shape[2], HALF=half, INTERLEAVED=where.interleaved,
            NORM=self.query_norm.kind != "none", SOFTCAP=self.softcap > 0, SPLITS=n,
            BLOCK_S=max(16, min(64, 8192 // padded)), num_warps=4, **launch_options(n_rows),
        )  # fmt: skip

    def __call__(self, x: Tensor, cache: tuple[Tensor, Tensor], where: Where) -> None:
        """The residual stream x (B, E) in float32, in place, after this block."""
        n_rows, dtype = len(x), cache[0].dtype
        qkv = self.joint(x, x.new_empty(n_rows, self.joint.n_outputs, dtype=dtype))
        heads = x.new_empty(n_rows, self.n_heads * self.d_head, dtype=dtype)
        self.attend(qkv, cache, where, heads)
        hidden = x.new_empty(n_rows, self.up.n_outputs, dtype=dtype)
        if self.parallel:
            self.up(x, hidden)
        self._add(self.output, heads, x, self.after[0])
        if not self.parallel:
            self.up(x, hidden)
        self._add(self.down, hidden, x, self.after[1])

    @staticmethod
    def _add(product: Product, given: Tensor, x: Tensor, after: FusedNorm) -> None:
        """x += product(given), or its norm."""
        if after.kind == "none":
            product(given, x, residual=True)
        else:
            after.add(product(given, torch.empty_like(x)), x, residual=True)


@dataclass(frozen=True)
class Where:
    """Where the rows of a decode step are: block tables, cached positions, and the rotation at each position."""

    tables: Tensor  # (B, W)
    lengths: Tensor  # (B,)
    cos: Tensor | None = None  # (positions, R/2)
    sin: Tensor | None = None
    interleaved: bool = False
    counters: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # kept from step to step

    def memory(self, n_rows: int, n_heads: int, n_kv_heads: int, n: int, d_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """What n programs for each key/value head need: parts (B, H, n, D), highest scores and sums (2, B, H, n), and
        counters (B, G), which are 0 again after each use."""
        device = self.lengths.device
        if (n_rows, n_kv_heads) not in self.counters:
            self.counters[n_rows, n_kv_heads] = torch.zeros(n_rows, n_kv_heads, dtype=torch.int32, device=device)
        parts = torch.empty(n_rows, n_heads, n, d_head, device=device)
        return parts, torch.empty(2, n_rows, n_heads, n, device=device), self.counters[n_rows, n_kv_heads]


def rotation_table(rotary: Rotary, n: int, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """Cosines and sines (n, R/2) of the first n positions, and whether neighbours are the pairs."""
    rotation = rotary(torch.arange(n, device=device)[None])
    cos, sin = (t[0, 0].contiguous() for t in (rotation.cos, rotation.sin))
    return cos, sin, rotation.layout == "interleaved"
