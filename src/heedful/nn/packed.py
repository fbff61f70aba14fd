"""Matrix products whose weights are packed for the processor, and maybe quantized: to run a model, not to train it.

    kind      a weight is                               on a CPU                    on a GPU
    float32   itself                                    oneDNN, laid out in blocks  plain
    bfloat16  rounded to 8 bits of precision            oneDNN, laid out in blocks  plain
    float16   rounded to 11 bits, at most 65,504        FBGEMM, x in float32        plain
    int8      round(w / s), s = max|w| / 127 of a row   FBGEMM, x in 8 bits too     plain, from int8 at each use
    int4      its nearest of 16 steps from a group's    ATen                        ATen
              least to its greatest value

In int8 FBGEMM multiplies integers: x is rounded to 8 bits as well, with a scale of its own for every row (a token of a
text), so that what else is in the batch does not matter. A few large inputs would leave all others few steps; so both
sides are turned first, (xH)(WH)ᵀ = xWᵀ, by a Hadamard matrix over neighbouring inputs, which spreads the large ones
(QuaRot, Ashkboos et al. 2024). int4 reads x in bfloat16.

The fast operators are not part of PyTorch's public interface: each is tried once, on a small product, and used only if
it agrees with the plain one.

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

from heedful.nn.embed import Embedding

Kind = Literal["float32", "bfloat16", "float16", "int8", "int4"]
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GROUP = 32  # of int4's inputs that share a scale
TURN = 32  # inputs that are turned together in int8, at most
TINY = 1e-30
# How far a way may be from the plain one, relative to the largest output: rounding of the sums; int8's rounding of x
# is up to half a step in 127, and in 63.
TOLERANCE: dict[Kind, float] = {
    "float32": 1e-5, "bfloat16": 0.02, "float16": 1e-3, "int8": 0.02, "int4": 0.02,
}  # fmt: skip


def hadamard(n_inputs: int) -> Tensor:
    """The orthogonal matrix (n, n) of ±1/√n for the largest power of two n that divides the inputs, up to TURN."""
    turn = torch.ones(1, 1)
    while len(turn) < TURN and n_inputs % (2 * len(turn)) == 0:
        turn = torch.cat([torch.cat([turn, turn], dim=1), torch.cat([turn, -turn], dim=1)]) / 2**0.5
    return turn


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Each n neighbours of the last dimension times `turn` (n, n)."""
    return torch.mm(x.reshape(-1, len(turn)), turn).view(x.shape)


def quantize_rows(weight: Tensor, turn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 and the scale of each row: (N, K) -> (N, K), (N,); turned before, if asked."""
    ints = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    for rows in _slices(weight):
        part = weight[rows].float() if turn is None else turned(weight[rows].float(), turn)
        scales[rows] = part.abs().amax(dim=1).clamp_(min=TINY) / 127
        ints[rows] = (part / scales[rows, None]).round_().to(torch.int8)
    return ints, scales


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """0 to 15 as uint8 (N, K), and each group's scale and middle in bfloat16 (N, K/G): w = (q - 8) · scale + middle."""
    steps = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.bfloat16)
    middle = torch.empty_like(scale)
    for rows in _slices(weight):
        groups = weight[rows].float().unflatten(1, (-1, GROUP))  # (n, K/G, G)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale[rows] = ((high - low) / 15).clamp_(min=TINY).bfloat16()
        middle[rows] = (low + 8 * scale[rows].float()).bfloat16()
        places = (groups - middle[rows, :, None].float()) / scale[rows, :, None].float() + 8
        steps[rows] = places.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return steps, scale, middle


def _slices(weight: Tensor) -> list[slice]:
    """Some rows at a time: what is needed on the way stays small."""
    return [slice(i, i + 1024) for i in range(0, len(weight), 1024)]


class Frozen(nn.Module):
    """Weights that neither learn nor move; `nbytes` is the memory they take."""

    nbytes: int

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("packed weights stay where and as they are: load the model anew, as you want it")


class Packed(Frozen):
    """x (..., K) -> x Wᵀ + b (..., N). A subclass is one way to keep W; `fits` says for which shapes it can."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()  # oneDNN reads no strides
        self.nbytes = 0 if bias is None else bias.nbytes

    @classmethod
    def fits(cls, n_outputs: int, n_inputs: int) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise ValueError(
                "packed weights pass no gradient on: train the model as it was loaded, then pack it"
            )
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
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
        self.nbytes += weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


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
    """int8 with a scale per row, multiplied as floats."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        turn = hadamard(self.n_inputs).to(weight.device)
        self.weight, self.scales = quantize_rows(weight.detach(), turn)
        self.turn = turn
        self.nbytes += self.weight.nbytes + self.scales.nbytes

    def product(self, x: Tensor) -> Tensor:
        y = F.linear(turned(x, self.turn.to(x.dtype)), self.weight.to(x.dtype)) * self.scales.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int8Fbgemm(Packed):
    """int8 with a scale per row; each row of x becomes int8 in the same way, so that integers are multiplied."""

    steps: ClassVar[int] = 127  # of x to either side of 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.turn = hadamard(self.n_inputs)
        ints, scales = quantize_rows(weight.detach(), self.turn)
        with fbgemm():
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(ints, scales.double(), zeros, 0)
            self.weight = torch.ops.quantized.linear_prepack(tensor, None)
        self.nbytes += ints.nbytes + 12 * len(scales)  # scale, zero and sum of each row

    def product(self, x: Tensor) -> Tensor:
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        x = turned(x, self.turn)
        if x.numel() == self.n_inputs:  # one row, and its scale a number: the same and quicker
            largest = max(x.abs().max().item(), TINY)
            y = multiply(x, largest / self.steps, 128, self.weight)
        else:
            scales = x.abs().amax(dim=-1, keepdim=True).clamp_(min=TINY)
            y = multiply(x / scales, 1 / self.steps, 128, self.weight).mul_(scales)
        return y if self.bias is None else y.add_(self.bias)


class Int8FbgemmNarrow(Int8Fbgemm):
    """For processors without VNNI, on which sums of products of 8 bits overflow 16: x has 7 bits."""

    steps = 63


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
        weight = (steps.to(x.dtype) - 8) * self.scale.to(x.dtype)[..., None] + self.middle.to(x.dtype)[
            ..., None
        ]
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


# How a kind of weights is kept by plain PyTorch, and on which device there is something faster.
PLAIN: dict[Kind, type[Packed]] = {
    "float32": Plain, "bfloat16": Plain, "float16": Plain, "int8": Int8, "int4": Int4,
}  # fmt: skip
FASTER: dict[tuple[str, Kind], tuple[type[Packed], ...]] = {
    ("cpu", "float32"): (OneDnn,),
    ("cpu", "bfloat16"): (OneDnn,),
    ("cpu", "float16"): (Float16Fbgemm,),
    ("cpu", "int8"): (Int8Fbgemm, Int8FbgemmNarrow),
    ("cpu", "int4"): (Int4Aten,),
    ("cuda", "int4"): (Int4Cuda,),
}


def activations(device: str, kind: Kind) -> torch.dtype:
    """The type of x, and so of all that a model remembers: on a CPU nothing narrow is faster, save for bfloat16."""
    if kind in ("float32", "bfloat16") or (kind == "float16" and device != "cpu"):
        return FLOATS[kind]
    return torch.float32 if device == "cpu" else torch.bfloat16


def product(weight: Tensor, bias: Tensor | None, kind: Kind) -> Packed:
    """The best way to multiply by these weights where they are. Inputs that no group of int4 divides get int8."""
    weight = weight.detach().to(FLOATS.get(kind, weight.dtype))
    device = weight.device.type
    for way in (*FASTER.get((device, kind), ()), PLAIN[kind]):
        if way.fits(*weight.shape) and agrees(way, device, kind):  # type: ignore[arg-type]  # types are hashable
            return way(weight, bias)
    assert kind == "int4", f"nothing keeps {tuple(weight.shape)} as {kind}"
    return product(weight, bias, "int8")


@functools.cache
def agrees(way: type[Packed], device: str, kind: Kind) -> bool:
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


class Table(Frozen):
    """Embeddings in float16, or in int8 with a scale per row; the vectors looked up are of the type `dtype`."""

    def __init__(self, table: Embedding, kind: Kind, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.dtype = table.scale, dtype
        self.scales: Tensor | None = None
        if kind == "float16":
            self.weight = table.weight.detach().half()
        else:
            self.weight, self.scales = quantize_rows(table.weight.detach())
        self.nbytes = self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.weight[tokens].to(self.dtype)  # (..., E)
        if self.scales is not None:
            x = x * self.scales[tokens][..., None].to(self.dtype)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype)
