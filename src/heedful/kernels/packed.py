"""Linear layers for inference, with weights packed for the processor and optionally quantized.

    kind      stored weight                             CPU, C kernels   CPU, without them      GPU
    float32   w                                         yes              oneDNN                 plain
    bfloat16  w with 8 bits of precision                yes              oneDNN                 plain
    float16   w with 11 bits, at most 65,504            yes              FBGEMM                 plain
    int8      round(w / s), s = max|w| / 127 of a       yes              ATen, a scale per row  Triton for a few rows,
              group of 32 inputs                                                                else dequantized
    int4      one of 16 levels from the least to the    yes              ATen                   the same
              greatest weight of a group

The C kernels are in cpu/; where they cannot run (see cpu/library.py), PyTorch operators outside its public interface
are used. Every implementation is checked once, on a small product, and used only if it agrees with plain PyTorch.

On a CPU x is float32. The bfloat16 kernels round it to bfloat16; the int8 and int4 C kernels quantize it to int8 with a
scale for every 32 inputs of a row, so that a result does not depend on the batch, and leave its outliers as they are.

    N outputs, K inputs, G inputs in a group
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.cpu.library import library
from heedful.kernels.cpu.linear import pack_int4_panels, pack_panels, packed_linear, packed_matrix
from heedful.kernels.cpu.memory import in_huge_pages
from heedful.kernels.cuda import few_rows_linear, has_triton
from heedful.kernels.quantize import GROUP, kept_integers, quantize_groups_int4, quantize_rows, quantize_weight

Precision = Literal["float32", "bfloat16", "float16", "int8", "int4"]
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tolerance of the self-check, relative to the largest output: rounding of sums and of x.
TOLERANCE: dict[Precision, float] = {
    "float32": 1e-5, "bfloat16": 0.02, "float16": 1e-3, "int8": 0.02, "int4": 0.02,
}  # fmt: skip


class Frozen(nn.Module):
    """A module with `n_weights` fixed weights in `nbytes` of memory; they can be neither trained nor moved."""

    nbytes: int
    n_weights: int

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("packed weights stay where and as they are: load the model anew, as you want it")


class Packed(Frozen):
    """A linear layer x Wᵀ + b with packed weights; subclasses are the implementations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()  # oneDNN ignores strides
        self.n_weights = weight.numel() + (0 if bias is None else bias.numel())
        self.nbytes = 0 if bias is None else bias.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether the implementation is available here and supports a weight of this shape."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N); no gradients."""
        if x.requires_grad:
            raise ValueError("packed weights pass no gradient on: train the model as it was loaded, then pack it")
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N), by this implementation."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Inputs, outputs and bias, for `repr`."""
        return f"{self.n_inputs}, {self.n_outputs}, bias={self.bias is not None}"


class Plain(Packed):
    """Unpacked weights and PyTorch's linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight.detach()
        self.nbytes += weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class OneDnn(Packed):
    """float32 or bfloat16 in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.to(weight.dtype))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
        self.nbytes += weight.nbytes
        self.dtype = weight.dtype

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y.to(x.dtype)


class Float16Fbgemm(Packed):
    """float16 packed by FBGEMM, converted to float32 in registers; float32 accumulation."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        with fbgemm():
            self.weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), self.bias)
        self.nbytes += 2 * weight.numel()

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.weight)


@contextmanager
def fbgemm() -> Iterator[None]:
    """Select the FBGEMM engine for packing, and silence the deprecation warning for qint8 tensors."""
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deprecated")
        torch.backends.quantized.engine = "fbgemm"
        try:
            yield
        finally:
            torch.backends.quantized.engine = engine


class Int8(Packed):
    """int8 with a scale per group, dequantized for every product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        quantized = quantize_weight(weight, "int8")
        self.weight, self.scales = quantized.ints, quantized.scale
        self.nbytes += self.weight.nbytes + self.scales.nbytes

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        scales = self.scales.to(x.dtype).repeat_interleave(GROUP, dim=1)[:, : self.n_inputs]
        return F.linear(x, self.weight.to(x.dtype) * scales, self.bias)


class Int8Triton(Int8):
    """int8 with a scale per group, by a Triton kernel for a few rows."""

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether it supports a weight of this shape."""
        return n_inputs % GROUP == 0 and has_triton()

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        found = few_rows_linear(self, x)
        return super().product(x) if found is None else found


class Int8Aten(Packed):
    """int8 with a scale per row, by ATen's kernel, which takes x in bfloat16 and converts weights in registers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight, scales = quantize_rows(weight.detach())
        self.scales = scales.bfloat16()
        self.nbytes += self.weight.nbytes + self.scales.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether it supports a weight of this shape."""
        return n_outputs % 32 == 0 and n_inputs % 32 == 0  # the kernel has no remainder loop

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        flat = x.reshape(-1, self.n_inputs).bfloat16()
        y = torch.ops.aten._weight_int8pack_mm(flat, self.weight, self.scales).to(x.dtype)
        y = y.view(*x.shape[:-1], self.n_outputs)
        return y if self.bias is None else y.add_(self.bias)


class Int4(Packed):
    """4 bits, two per byte, with a scale and a zero point per group; dequantized for every product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        quantized = quantize_weight(weight, "int4")
        assert quantized.zero is not None
        ints, self.scale, self.zero = quantized.ints, quantized.scale, quantized.zero
        self.weight = ints[:, ::2] | ints[:, 1::2] << 4  # (N, K/2)
        self.nbytes += self.weight.nbytes + self.scale.nbytes + self.zero.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether it supports a weight of this shape."""
        return n_inputs % GROUP == 0

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        ints = torch.stack([self.weight & 15, self.weight >> 4], dim=-1).view(self.n_outputs, -1, GROUP)
        weight = (ints.to(x.dtype) - 8) * self.scale.to(x.dtype)[..., None] + self.zero.to(x.dtype)[..., None]
        return F.linear(x, weight.flatten(1), self.bias)


class Int4Triton(Int4):
    """4 bits with a scale and a zero point per group, by a Triton kernel for a few rows."""

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether it supports a weight of this shape."""
        return super().fits(n_outputs, n_inputs) and has_triton()

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        found = few_rows_linear(self, x)
        return super().product(x) if found is None else found


class Int4Aten(Packed):
    """4 bits in the layout of ATen's CPU kernel, which takes x in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        kept = kept_integers(weight, "int4")
        if kept is None or kept.zero is None:
            ints, scale, zero = quantize_groups_int4(weight.detach(), torch.bfloat16)
        else:
            ints, scale, zero = kept.ints, kept.scale.bfloat16(), kept.zero.bfloat16()
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(ints.int(), 1)
        self.scales_and_zeros = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()  # (K/G, N, 2)
        self.nbytes += self.weight.nbytes + self.scales_and_zeros.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether it supports a weight of this shape."""
        return n_inputs % GROUP == 0 and n_outputs % 16 == 0

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        flat = x.reshape(-1, self.n_inputs).bfloat16()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.weight, GROUP, self.scales_and_zeros).to(x.dtype)
        y = y.view(*x.shape[:-1], self.n_outputs)
        return y if self.bias is None else y.add_(self.bias)


class Panels(Packed):
    """Weights for the C kernels, in panels of 32 outputs; `kind` selects the kernel."""

    kind: ClassVar[Precision]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        panels, scales = self.layout(weight)
        self.weight, self.scales = in_huge_pages(panels), None if scales is None else in_huge_pages(scales)
        self.nbytes += self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)
        self.matrix = packed_matrix(self.kind, self.weight, self.n_inputs, self.n_outputs, self.bias, self.scales)

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether the C kernels are available."""
        return library() is not None

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The panels of a weight (N, K), and its scales if it is quantized."""
        return pack_panels(weight.detach(), 1), None

    def product(self, x: Tensor) -> Tensor:
        """x (..., K) -> x Wᵀ + b (..., N)."""
        return packed_linear(self.matrix, x)


class Float32Panels(Panels):
    """float32 panels."""

    kind = "float32"


class Float16Panels(Panels):
    """float16 panels, converted to float32 in registers."""

    kind = "float16"


class BFloat16Panels(Panels):
    """bfloat16 panels with pairs of inputs adjacent, for the dot product instruction."""

    kind = "bfloat16"

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The panels of a weight (N, K), and its scales if it is quantized."""
        return pack_panels(weight.detach(), 2), None


class Int8Panels(Panels):
    """int8 panels with four inputs adjacent, for the VNNI dot product, and a scale per group."""

    kind = "int8"

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The panels of a weight (N, K), and its scales if it is quantized."""
        quantized = quantize_weight(weight, "int8")
        ints = F.pad(quantized.ints, (0, -weight.shape[1] % GROUP))
        bytes_ = pack_panels(ints, 4).view(torch.uint8).bitwise_xor_(128)  # q + 128: VNNI needs unsigned
        return bytes_, pack_panels(quantized.scale, 1)[..., 0]


class Int4Panels(Panels):
    """4-bit panels, with a scale and a zero point per group."""

    kind = "int4"

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        """Whether it supports a weight of this shape."""
        return n_inputs % GROUP == 0 and super().fits(n_outputs, n_inputs)

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The panels of a weight (N, K), and its scales if it is quantized."""
        quantized = quantize_weight(weight, "int4")
        assert quantized.zero is not None
        both = [pack_panels(t, 1)[..., 0] for t in (quantized.scale, quantized.zero)]  # (N/32, K/G, 32)
        return pack_int4_panels(quantized.ints), torch.stack(both, dim=2)


# The reference implementation of each kind in plain PyTorch, and faster ones by device, in order of preference.
PLAIN: dict[Precision, type[Packed]] = {
    "float32": Plain, "bfloat16": Plain, "float16": Plain, "int8": Int8, "int4": Int4,
}  # fmt: skip
FASTER: dict[tuple[str, Precision], tuple[type[Packed], ...]] = {
    ("cpu", "float32"): (Float32Panels, OneDnn),
    ("cpu", "bfloat16"): (BFloat16Panels, OneDnn),
    ("cpu", "float16"): (Float16Panels, Float16Fbgemm),
    ("cpu", "int8"): (Int8Panels, Int8Aten),
    ("cpu", "int4"): (Int4Panels, Int4Aten),
    ("cuda", "int8"): (Int8Triton,),
    ("cuda", "int4"): (Int4Triton,),
}


def activations(device: str, kind: Precision) -> torch.dtype:
    """The type of activations and KV cache: float32 on a CPU, where narrower types are not faster."""
    return torch.float32 if device == "cpu" else FLOATS.get(kind, torch.bfloat16)


def pack_weight(weight: Tensor, bias: Tensor | None, kind: Precision) -> Packed:
    """The weights in the fastest implementation on their device; int4 becomes int8 if groups do not divide K. Integers
    that the weight keeps (`kept_integers`) are taken as they are."""
    if kind in FLOATS:
        weight = weight.detach().to(FLOATS[kind])
    device = weight.device.type
    for implementation in (*FASTER.get((device, kind), ()), PLAIN[kind]):
        if implementation.fits(*weight.shape) and passes_self_check(implementation, device, kind):  # type: ignore[arg-type]
            return implementation(weight, bias)
    assert kind == "int4", f"no implementation of {kind} for a weight of {tuple(weight.shape)}"
    return pack_weight(weight, bias, "int8")


@functools.cache
def passes_self_check(implementation: type[Packed], device: str, kind: Precision) -> bool:
    """Whether the implementation's operators exist here and agree with the reference implementation."""
    plain = PLAIN[kind]
    if implementation is plain:
        return True
    dtype = activations(device, kind)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=draw)
    weight[0], weight[1] = 3, -3  # extreme values, to reveal integer overflow
    x = torch.cat([torch.randn(4, 256, generator=draw), torch.ones(1, 256)])
    x, bias = x.to(device, dtype), weight[:, 0].to(device, dtype)
    weight = weight.to(device, FLOATS.get(kind, dtype))
    try:
        for rows in x, x[-1:], x[None]:
            result, expected = implementation(weight, bias)(rows).float(), plain(weight, bias)(rows).float()
            if not (result - expected).abs().max() < TOLERANCE[kind] * expected.abs().max():
                return False
    except Exception:  # no such operator, or not on this processor, or Triton finds no compiler
        return False
    return True
