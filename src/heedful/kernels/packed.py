"""Matrix products whose weights are packed for the processor, and maybe quantized: to run a model, not to train it.

    kind      a weight is                               on a CPU              elsewhere on a CPU  on a GPU
    float32   itself                                    our kernels           oneDNN              plain
    bfloat16  rounded to 8 bits of precision            our kernels           oneDNN              plain
    float16   rounded to 11 bits, at most 65,504        our kernels           FBGEMM              plain
    int8      round(w / s), s = max|w| / 127 of a       our kernels           ATen, s of a row    plain, from int8
              group of 32 inputs
    int4      its nearest of 16 steps from a group's    our kernels           ATen                ATen
              least to its greatest value

Our kernels are in cpu/; where they cannot run (see cpu/library.py) the operators named next do, which are not part of
PyTorch's public interface. Each is tried once, on a small product, and used only if it agrees with the plain one.

On a CPU x is float32. bfloat16 rounds it for the product; for int8 and int4 our kernels round it to 8 bits, with a
scale for every 32 neighbours of a row: a few large inputs leave the others their steps, and what else is in the batch
does not matter.

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
from heedful.kernels.quantize import GROUP, quantize_evenly, quantize_groups, quantize_rows

Precision = Literal["float32", "bfloat16", "float16", "int8", "int4"]
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How far a way may be from the plain one, relative to the largest output: rounding of the sums, and of x.
TOLERANCE: dict[Precision, float] = {
    "float32": 1e-5, "bfloat16": 0.02, "float16": 1e-3, "int8": 0.02, "int4": 0.02,
}  # fmt: skip


class Frozen(nn.Module):
    """Weights that neither learn nor move: `n_weights` of them, in `nbytes` of memory."""

    nbytes: int
    n_weights: int

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("packed weights stay where and as they are: load the model anew, as you want it")


class Packed(Frozen):
    """x (..., K) -> x Wᵀ + b (..., N). A subclass is one way to keep W; `fits` says for which shapes it can."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()  # oneDNN reads no strides
        self.n_weights = weight.numel() + (0 if bias is None else bias.numel())
        self.nbytes = 0 if bias is None else bias.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise ValueError("packed weights pass no gradient on: train the model as it was loaded, then pack it")
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.n_inputs}, {self.n_outputs}, bias={self.bias is not None}"


class Plain(Packed):
    """The weights as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight.detach()
        self.nbytes += weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class OneDnn(Packed):
    """float32 or bfloat16, in blocks as oneDNN's kernels read them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.to(weight.dtype))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
        self.nbytes += weight.nbytes
        self.dtype = weight.dtype

    def product(self, x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y.to(x.dtype)


class Float16Fbgemm(Packed):
    """float16, widened to float32 as it is read: half the memory, sums in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        with fbgemm():
            self.weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), self.bias)
        self.nbytes += 2 * weight.numel()

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.weight)


@contextmanager
def fbgemm() -> Iterator[None]:
    """Packing is FBGEMM's inside, and says nothing of PyTorch's plan to drop tensors of the type qint8."""
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deprecated")
        torch.backends.quantized.engine = "fbgemm"
        try:
            yield
        finally:
            torch.backends.quantized.engine = engine


class Int8(Packed):
    """int8 with a scale per group, multiplied as floats."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight, self.scales = quantize_evenly(weight.detach())
        self.nbytes += self.weight.nbytes + self.scales.nbytes

    def product(self, x: Tensor) -> Tensor:
        scales = self.scales.to(x.dtype).repeat_interleave(GROUP, dim=1)[:, : self.n_inputs]
        return F.linear(x, self.weight.to(x.dtype) * scales, self.bias)


class Int8Aten(Packed):
    """int8 with a scale per row, by ATen's kernel: it reads x in bfloat16 and widens the weights in registers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight, scales = quantize_rows(weight.detach())
        self.scales = scales.bfloat16()
        self.nbytes += self.weight.nbytes + self.scales.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return n_outputs % 32 == 0 and n_inputs % 32 == 0  # whole vectors

    def product(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.n_inputs).bfloat16()
        y = torch.ops.aten._weight_int8pack_mm(flat, self.weight, self.scales).to(x.dtype)
        y = y.view(*x.shape[:-1], self.n_outputs)
        return y if self.bias is None else y.add_(self.bias)


class Int4(Packed):
    """Two numbers to a byte, groups with a scale and a middle each; multiplied as floats."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        steps, self.scale, self.middle = quantize_groups(weight.detach())
        self.weight = steps[:, ::2] | steps[:, 1::2] << 4  # (N, K/2)
        self.nbytes += self.weight.nbytes + self.scale.nbytes + self.middle.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return n_inputs % GROUP == 0

    def product(self, x: Tensor) -> Tensor:
        steps = torch.stack([self.weight & 15, self.weight >> 4], dim=-1).view(self.n_outputs, -1, GROUP)
        weight = (steps.to(x.dtype) - 8) * self.scale.to(x.dtype)[..., None] + self.middle.to(x.dtype)[..., None]
        return F.linear(x, weight.flatten(1), self.bias)


class Int4Aten(Packed):
    """The same laid out for ATen's kernels on a CPU, which read x in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        steps, scale, middle = quantize_groups(weight.detach())
        self.weight = self.layout(steps)
        self.scale = torch.stack([scale, middle], dim=-1).transpose(0, 1).contiguous()  # (K/G, N, 2)
        self.nbytes += self.weight.nbytes + self.scale.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return n_inputs % GROUP == 0 and n_outputs % 16 == 0

    @staticmethod
    def layout(steps: Tensor) -> Tensor:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.int(), 1)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, GROUP, scale)

    def product(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.n_inputs).bfloat16()
        y = self.multiply(flat, self.weight, self.scale).to(x.dtype).view(*x.shape[:-1], self.n_outputs)
        return y if self.bias is None else y.add_(self.bias)


class Int4Cuda(Int4Aten):
    """And for those on a GPU."""

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return n_inputs % 128 == 0 and n_outputs % 8 == 0

    @staticmethod
    def layout(steps: Tensor) -> Tensor:
        pairs = steps[:, ::2] << 4 | steps[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs, 8)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, weight, GROUP, scale)


class Panels(Packed):
    """Outputs by 32, as our own kernels read them; `kind` is the kernel's name."""

    kind: ClassVar[Precision]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        laid, scales = self.layout(weight.detach())
        self.weight, self.scales = in_huge_pages(laid), None if scales is None else in_huge_pages(scales)
        self.nbytes += self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)
        self.matrix = packed_matrix(self.kind, self.weight, self.n_inputs, self.n_outputs, self.bias, self.scales)

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return library() is not None

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return pack_panels(weight, 1), None

    def product(self, x: Tensor) -> Tensor:
        return packed_linear(self.matrix, x)


class Float32Panels(Panels):
    kind = "float32"


class Float16Panels(Panels):
    kind = "float16"


class BFloat16Panels(Panels):
    kind = "bfloat16"

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return pack_panels(weight, 2), None


class Int8Panels(Panels):
    kind = "int8"

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        ints, scales = quantize_evenly(weight)
        ints = F.pad(ints, (0, -ints.shape[1] % GROUP))
        bytes_ = pack_panels(ints, 4).view(torch.uint8).bitwise_xor_(128)  # 128 more
        return bytes_, pack_panels(scales, 1)[..., 0]


class Int4Panels(Panels):
    kind = "int4"

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return n_inputs % GROUP == 0 and super().fits(n_outputs, n_inputs)

    @staticmethod
    def layout(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        steps, scale, middle = quantize_groups(weight)
        both = [pack_panels(t, 1)[..., 0] for t in (scale, middle)]  # (N/32, K/G, 32)
        return pack_int4_panels(steps), torch.stack(both, dim=2)


# How a kind of weights is kept by plain PyTorch, and on which device there is something faster, the best first.
PLAIN: dict[Precision, type[Packed]] = {
    "float32": Plain, "bfloat16": Plain, "float16": Plain, "int8": Int8, "int4": Int4,
}  # fmt: skip
FASTER: dict[tuple[str, Precision], tuple[type[Packed], ...]] = {
    ("cpu", "float32"): (Float32Panels, OneDnn),
    ("cpu", "bfloat16"): (BFloat16Panels, OneDnn),
    ("cpu", "float16"): (Float16Panels, Float16Fbgemm),
    ("cpu", "int8"): (Int8Panels, Int8Aten),
    ("cpu", "int4"): (Int4Panels, Int4Aten),
    ("cuda", "int4"): (Int4Cuda,),
}


def activations(device: str, kind: Precision) -> torch.dtype:
    """The type of x, and so of all that a model remembers: on a CPU nothing narrower is faster."""
    return torch.float32 if device == "cpu" else FLOATS.get(kind, torch.bfloat16)


def pack_weight(weight: Tensor, bias: Tensor | None, kind: Precision) -> Packed:
    """The best way to multiply by these weights where they are. Inputs that no group of int4 divides get int8."""
    weight = weight.detach().to(FLOATS.get(kind, weight.dtype))
    device = weight.device.type
    for way in (*FASTER.get((device, kind), ()), PLAIN[kind]):
        if way.fits(*weight.shape) and agrees(way, device, kind):  # type: ignore[arg-type]  # types are hashable
            return way(weight, bias)
    assert kind == "int4", f"nothing keeps {tuple(weight.shape)} as {kind}"
    return pack_weight(weight, bias, "int8")


@functools.cache
def agrees(way: type[Packed], device: str, kind: Precision) -> bool:
    """Whether the operators of this way exist here and multiply as the plain way of the kind does."""
    plain = PLAIN[kind]
    if way is plain:
        return True
    dtype = activations(device, kind)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=draw)
    weight[0], weight[1] = 3, -3  # all at the ends of their ranges: where integers overflow, it shows
    x = torch.cat([torch.randn(4, 256, generator=draw), torch.ones(1, 256)])
    x, bias = x.to(device, dtype), weight[:, 0].to(device, dtype)
    weight = weight.to(device, FLOATS.get(kind, dtype))
    try:
        for rows in x, x[-1:], x[None]:
            ours, theirs = way(weight, bias)(rows).float(), plain(weight, bias)(rows).float()
            if not (ours - theirs).abs().max() < TOLERANCE[kind] * theirs.abs().max():
                return False
    except (AttributeError, RuntimeError):  # no such operator, or not for this processor
        return False
    return True
