"""A linear layer that learns by a small change beside its frozen weights: LoRA (Hu et al. 2021), and QLoRA (Dettmers
et al. 2023), where the frozen weights take 4 bits.

    y = W x + b + (alpha / rank) · B A x      A (rank, K) random, B (N, rank) zero at first: it begins as it was

NF4, as in the QLoRA paper (sections 2 and 3): each block of 64 weights is divided by its largest magnitude and rounded
to the nearest of 16 levels, the quantiles of a normal distribution (appendix E). The magnitudes are quantized again,
less their mean, to 8 bits in groups of 256. That is 4 + 8/64 + 32/(64·256) = 4.127 bits per weight. We differ in two
places: the 8 bits are integers, which err less here than the paper's floats, and weights are rounded with the
magnitudes as they are read back, so that one rounding does not add to the other.

    N outputs, K inputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

M = TypeVar("M", bound=nn.Module)

BLOCK, GROUP = 64, 256  # weights that share a magnitude, magnitudes that share a step
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
AT_ONCE = 2**14  # blocks: what is needed on the way stays small


class NF4(nn.Module):
    """A frozen matrix (N, K) in 4 bits; calling it multiplies, and passes gradients on to x."""

    codes: Tensor  # (n,) uint8, two weights to a byte
    steps: Tensor  # (blocks,) int8: the magnitude of each block is steps · span + mean
    spans: Tensor  # (groups,) float32
    mean: Tensor  # () float32
    levels: Tensor  # (16,) float32, here so that nothing is copied to a GPU when it multiplies

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        flat = weight.detach().reshape(-1)
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        magnitudes = blocks.abs().amax(dim=1).float()
        mean = magnitudes.mean()
        groups = F.pad(magnitudes - mean, (0, -len(magnitudes) % GROUP)).view(-1, GROUP)
        spans = groups.abs().amax(dim=1).clamp(min=1e-30) / 127
        steps = (groups / spans[:, None]).round().to(torch.int8).view(-1)[: len(magnitudes)]
        codes = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=weight.device)
        magnitudes = _magnitudes(steps, spans, mean).clamp(min=1e-30)
        levels = torch.tensor(LEVELS, device=weight.device)
        borders = (levels[1:] + levels[:-1]) / 2
        for begin in range(0, len(blocks), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            nearest = torch.bucketize(blocks[some].float() / magnitudes[some, None], borders).to(torch.uint8)
            codes[some] = nearest[:, ::2] | nearest[:, 1::2] << 4
        kept = {"codes": codes.view(-1), "steps": steps, "spans": spans, "mean": mean, "levels": levels}
        for name, value in kept.items():
            self.register_buffer(name, value)

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.codes, self.steps, self.spans, self.mean, self.levels

    def dense(self) -> Tensor:
        """The matrix, as near as it is kept, in the type it came in."""
        return _dense(self.kept, self.shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if mixed else x.dtype
        y: Tensor = _Product.apply(x, self.shape, dtype, *self.kept)  # type: ignore[no-untyped-call]
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """It moves to other devices, but model.bfloat16() does not make its floats less exact."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.shape[1]}, {self.shape[0]}"


def _magnitudes(steps: Tensor, spans: Tensor, mean: Tensor) -> Tensor:
    wide = spans.repeat_interleave(GROUP)[: len(steps)]
    return (steps * wide + mean).clamp_(min=0)


def _dense(kept: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    codes, steps, spans, mean, levels = kept
    # The two weights of each of the 256 bytes, in its low and in its high bits: (256, 2).
    pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1).to(dtype)
    blocks = F.embedding(codes.int(), pairs).view(-1, BLOCK)
    blocks *= _magnitudes(steps, spans, mean)[:, None].to(dtype)
    return blocks.view(-1)[: math.prod(shape)].view(shape)


class _Product(torch.autograd.Function):
    """x Wᵀ, with W made from its 4 bits in the forward and again in the backward pass, and not kept between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, dtype: torch.dtype, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.shape, ctx.dtype, ctx.given = shape, dtype, x.dtype
        return F.linear(x.to(dtype), _dense(kept, shape, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = _dense(ctx.saved_tensors, ctx.shape, ctx.dtype)
        return (gradient.to(ctx.dtype) @ weight).to(ctx.given), *[None] * (2 + len(ctx.saved_tensors))


class LoRALinear(nn.Module):
    """In place of a linear layer, and with its weight and bias under their own names, frozen.

    `quantized` keeps the weight in 4 bits instead (`stored`). A and B are float32 at least: small steps must count.
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
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as the paper's own code draws it

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        if self.stored is None:
            assert self.weight is not None
            y = F.linear(x, self.weight, self.bias)
        else:
            y = self.stored(x)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        small = F.linear(self.dropout(x).to(self.lora_a.dtype), self.lora_a) * self.scale  # (..., rank)
        return y + F.linear(small, self.lora_b).to(y.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The plain layer that does the same."""
        weight = self.weight if self.stored is None else self.stored.dense()
        assert weight is not None
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        change = self.lora_b @ self.lora_a * self.scale
        linear.weight = nn.Parameter((weight.to(change.dtype) + change).to(weight.dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach())
        return linear.train(self.training)

    def extra_repr(self) -> str:
        bits = ", 4 bits" if self.stored is not None else ""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, alpha={self.alpha:g}{bits}"


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def merge(model: M) -> M:
    """The same model, changed in place: every adapted layer a plain one again, and all parameters learning."""
    for name, layer in adapted(model).items():
        replace_module(model, name, layer.merged())
    model.requires_grad_(True)
    return model


def refuse_adapted(model: nn.Module, doing: str) -> None:
    """ValueError if the model has adapters, for what must not leave them behind."""
    if adapted(model):
        raise ValueError(
            f"a model with adapters is not {doing}: merge them first (heedful.train.adapters.merge), or keep them "
            "alone with heedful.weights.save_adapter.save_adapter"
        )
