"""LoRA (Hu et al. 2021): a linear layer with frozen weights and a trained low-rank update; and QLoRA (Dettmers et al.
2023), with the frozen weights quantized to 4 bits.

    y = W x + b + (alpha / rank) · B A x      A (rank, K) random, B (N, rank) zero, so that training starts from W

NF4 as in the QLoRA paper (sections 2 and 3): each block of 64 weights is divided by its absolute maximum (absmax) and
rounded to the nearest of 16 levels, the quantiles of a normal distribution (appendix E). Double quantization: the
absmax values, less their mean, are quantized to 8 bits in groups of 256. That is 4 + 8/64 + 32/(64·256) = 4.127 bits
per weight. We differ in two places: the 8 bits are integers, whose error here is smaller than that of the paper's
floats, and weights are rounded with the dequantized absmax, so that the two rounding errors do not add up.

    N outputs, K inputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

M = TypeVar("M", bound=nn.Module)

BLOCK, GROUP = 64, 256  # weights that share an absmax, absmax values that share a scale
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
CHUNK = 2**14  # blocks quantized at a time, to bound temporary memory


class NF4(nn.Module):
    """A frozen matrix (N, K) quantized to NF4; calling it computes x Wᵀ, with gradients for x only."""

    codes: Tensor  # (n,) uint8, two weights per byte
    absmax_codes: Tensor  # (blocks,) int8: absmax = code · scale + mean
    absmax_scales: Tensor  # (groups,) float32
    absmax_mean: Tensor  # () float32
    levels: Tensor  # (16,) float32, a buffer so that products need no copy to the GPU

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        flat = weight.detach().reshape(-1)
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1).float()
        mean = absmax.mean()
        groups = F.pad(absmax - mean, (0, -len(absmax) % GROUP)).view(-1, GROUP)
        scales = groups.abs().amax(dim=1).clamp(min=1e-30) / 127
        absmax_codes = (groups / scales[:, None]).round().to(torch.int8).view(-1)[: len(absmax)]
        codes = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=weight.device)
        absmax = _dequantize_absmax(absmax_codes, scales, mean).clamp(min=1e-30)
        levels = torch.tensor(LEVELS, device=weight.device)
        midpoints = (levels[1:] + levels[:-1]) / 2
        for begin in range(0, len(blocks), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            nearest = torch.bucketize(blocks[chunk].float() / absmax[chunk, None], midpoints).to(torch.uint8)
            codes[chunk] = nearest[:, ::2] | nearest[:, 1::2] << 4
        self.register_buffer("codes", codes.view(-1))
        self.register_buffer("absmax_codes", absmax_codes)
        self.register_buffer("absmax_scales", scales)
        self.register_buffer("absmax_mean", mean)
        self.register_buffer("levels", levels)

    @property
    def n_weights(self) -> int:
        """Number of weights, N · K."""
        return math.prod(self.shape)

    @property
    def _quantized(self) -> Sequence[Tensor]:
        return self.codes, self.absmax_codes, self.absmax_scales, self.absmax_mean, self.levels

    def dense(self) -> Tensor:
        """The dequantized matrix (N, K), in the original type."""
        return _dequantize(self._quantized, self.shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ (..., N), in the autocast type where autocast is on."""
        device = x.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        y: Tensor = _Product.apply(x, self.shape, dtype, *self._quantized)  # type: ignore[no-untyped-call]
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device, but keep the buffers' types: model.bfloat16() does not round the scales."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Inputs and outputs, for `repr`."""
        return f"{self.shape[1]}, {self.shape[0]}"


def _dequantize_absmax(codes: Tensor, scales: Tensor, mean: Tensor) -> Tensor:
    return (codes * scales.repeat_interleave(GROUP)[: len(codes)] + mean).clamp_(min=0)


def _dequantize(quantized: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    codes, absmax_codes, absmax_scales, absmax_mean, levels = quantized
    # A lookup table (256, 2) from each byte to the two weights in its low and high bits.
    pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1).to(dtype)
    blocks = F.embedding(codes.int(), pairs).view(-1, BLOCK)
    blocks *= _dequantize_absmax(absmax_codes, absmax_scales, absmax_mean)[:, None].to(dtype)
    return blocks.view(-1)[: math.prod(shape)].view(shape)


class _Product(torch.autograd.Function):
    """x Wᵀ; W is dequantized in the forward pass and again in the backward pass, and not stored between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, dtype: torch.dtype, *quantized: Tensor) -> Tensor:
        ctx.save_for_backward(*quantized)
        ctx.shape, ctx.dtype, ctx.x_dtype = shape, dtype, x.dtype
        return F.linear(x.to(dtype), _dequantize(quantized, shape, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = _dequantize(ctx.saved_tensors, ctx.shape, ctx.dtype)
        return (gradient.to(ctx.dtype) @ weight).to(ctx.x_dtype), *[None] * (2 + len(ctx.saved_tensors))


class LoRALinear(nn.Module):
    """A linear layer with a LoRA adapter; weight and bias keep their names and are frozen.

    `quantized` replaces the weight by its NF4 form (`stored`). A and B are at least float32, so that small updates are
    not rounded away.
    """

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0, *, quantized: bool = False
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"a rank of {rank} adapts nothing: it is 1 or more")
        self.in_features, self.out_features = base.in_features, base.out_features
        self.alpha, self.rank = float(alpha), rank
        self.weight = None if quantized else base.weight.requires_grad_(False)
        self.stored = NF4(base.weight) if quantized else None
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features, dtype=wide))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank, dtype=wide))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as in the authors' code

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> W x + b + scale · B A x (..., N)."""
        if self.stored is None:
            assert self.weight is not None
            y = F.linear(x, self.weight, self.bias)
        else:
            y = self.stored(x)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        low_rank = F.linear(self.dropout(x).to(self.lora_a.dtype), self.lora_a) * self.scale  # (..., rank)
        return y + F.linear(low_rank, self.lora_b).to(y.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The plain linear layer with the weight W + scale · B A."""
        weight = self.weight if self.stored is None else self.stored.dense()
        assert weight is not None
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        update = self.lora_b @ self.lora_a * self.scale
        linear.weight = nn.Parameter((weight.to(update.dtype) + update).to(weight.dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach())
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """Inputs, outputs, rank and alpha, for `repr`."""
        bits = ", 4 bits" if self.stored is not None else ""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, alpha={self.alpha:g}{bits}"


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    """The LoRA layers of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the adapters add nothing: the model is what it was before they were trained."""
    alphas = {layer: layer.alpha for layer in adapted(model).values()}
    try:
        for layer in alphas:
            layer.alpha = 0.0
        yield
    finally:
        for layer, alpha in alphas.items():
            layer.alpha = alpha


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this dotted name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def merge(model: M) -> M:
    """Merge every adapter into its linear layer, in place, and make all parameters trainable again."""
    for name, layer in adapted(model).items():
        replace_module(model, name, layer.merged())
    model.requires_grad_(True)
    return model


def refuse_adapted(model: nn.Module, doing: str) -> None:
    """Raise ValueError if the model has adapters; `doing` is what would lose them, for the message."""
    if adapted(model):
        raise ValueError(
            f"a model with adapters is not {doing}: merge them first (heedful.train.adapters.merge), or keep them "
            "alone with heedful.weights.save_adapter.save_adapter"
        )
