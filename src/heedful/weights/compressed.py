"""int8 and int4 weights in safetensors, in the layout of the hub's `compressed-tensors`.

int8    a matrix (out, in) as int8, with a scale for each row, `NAME_scale` (out, 1): a quarter of float32's size
int4    eight numbers in an int32, `NAME_packed` (out, in/8), a float16 scale for each 32 inputs, `NAME_scale`
        (out, in/32), and `NAME_shape`: 4.5 bits a number. For the linear layers of blocks; other matrices (embeddings,
        heads) are int8, since every prediction depends on them. A calibrated model has `NAME_zero_point` too, those of
        eight rows in an int32 (out/8, in/32): weight = (ints - zero point) * scale

Without them weight = ints * scale, and config.json tells by `quantization_config`. Loading multiplies, and the
model is an ordinary one of floats, of the type that config.json names; one that is loaded to be packed in int8 or int4
keeps the integers for the kernels. Integers that calibration found are written as they are. Vectors (norms, biases)
are stored as they are. transformers reads such a model unless its head is the embedding: it cannot tie int8. GPT-2's
matrices are transposed on the hub, whose tools have no int4 of them: with int4 they are written in our own layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.quantize import (
    GROUP,
    QuantizedWeight,
    best_scales,
    int4_weight,
    kept_integers,
    round_int4,
)
from heedful.models.mapping import Entry
from heedful.nn.block import Block
from heedful.nn.feedforward import MixtureOfExperts
from heedful.weights.load import FLOATS, TensorSource

Quantized = Literal["int8", "int4"]

SCALE, PACKED, SHAPE, ZERO_POINT = "_scale", "_packed", "_shape", "_zero_point"
INT4_BYTES = 1 / 2 + 2 / GROUP  # of a number
SYMMETRIC = {"type": "int", "symmetric": True}
INT8: Mapping[str, Any] = {
    "targets": ["Linear", "Embedding"],
    "weights": {"num_bits": 8, **SYMMETRIC, "strategy": "channel", "dynamic": False},
    "format": "int-quantized",
}
INT4: Mapping[str, Any] = {
    "weights": {"num_bits": 4, **SYMMETRIC, "strategy": "group", "group_size": GROUP, "dynamic": False},
    "format": "pack-quantized",
}


def quantization_config(packed: Collection[str] = (), *, zero_points: bool = False) -> dict[str, Any]:
    """config.json's `quantization_config` of a model with these tensors in int4, with or without zero points, and its
    other matrices in int8."""
    groups = {"group_0": INT8}
    if packed:
        targets = sorted({"re:" + re.sub(r"\d+", r"\\d+", re.escape(n.removesuffix(".weight"))) + "$" for n in packed})
        weights = {**INT4["weights"], "symmetric": not zero_points}
        groups = {"group_0": {"targets": targets, **INT4, "weights": weights}, "group_1": INT8}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if packed else INT8["format"],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
    }


def is_supported(quantization: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` describes one of these layouts."""
    groups = quantization.get("config_groups")
    if quantization.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or not groups:
        return False
    return all(isinstance(group, Mapping) and _is_supported(group, quantization) for group in groups.values())


def _is_supported(group: Mapping[str, Any], quantization: Mapping[str, Any]) -> bool:
    weights, layout = group.get("weights"), group.get("format") or quantization.get("format")
    if not isinstance(weights, Mapping) or weights.get("type") != "int":
        return False
    kind = weights.get("num_bits"), weights.get("strategy")
    if layout == "pack-quantized":
        return kind in ((4, "group"), (4, "channel")) and isinstance(weights.get("symmetric"), bool)
    return (
        weights.get("symmetric") is True and kind == (8, "channel") and layout in ("int-quantized", "naive-quantized")
    )


# --- numbers ---------------------------------------------------------------------------------------------------------


def compress_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (out, in) and scales (out, 1) of a matrix: the largest of each row becomes 127. The scales are numbers that
    float16 has, where its precision and range suffice: the kernels, whose scales it is, then take the same integers."""
    full = weight.float()
    scale = full.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    scale = torch.where((scale > 2**-14) & (scale < 2**15), scale.half().float(), scale)
    return (full / scale).round().clamp(-127, 127).to(torch.int8), scale


def pack_int4(ints: Tensor) -> Tensor:
    """Integers from -8 to 7 (out, in) -> int32 (out, in/8): q + 8 in four bits, the first in the lowest."""
    unsigned = (ints + 8).to(torch.uint8)
    return (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).flatten().view(torch.int32).unflatten(0, (len(ints), -1))


def pack_rows_int4(ints: Tensor) -> Tensor:
    """Integers from -8 to 7 (out, groups) -> int32 (out/8 rounded up, groups): those of eight rows in one."""
    return pack_int4(F.pad(ints.T, (0, -len(ints) % 8), value=-8).contiguous()).T.contiguous()


def unpack_int4(packed: Tensor, n: int) -> Tensor:
    """The integers from -8 to 7 (out, n), in float32, of int32 (out, at least n/8)."""
    pairs = packed.contiguous().flatten().view(torch.uint8).unflatten(0, (len(packed), -1))
    full = torch.empty(*pairs.shape, 2)
    full[..., 0], full[..., 1] = pairs & 15, pairs >> 4
    return full.flatten(1)[:, :n].sub_(8)


def multiply_int4(packed: Tensor, scales: Tensor, n: int, zero_point: Tensor | None = None) -> Tensor:
    """The matrix (out, n) in float32 of packed integers (out, at least n/8), scales and zero points (out, groups)."""
    full = unpack_int4(packed, n)
    if zero_point is not None:
        full.unflatten(1, (scales.shape[1], -1)).sub_(zero_point.float().unsqueeze(2))
    full.unflatten(1, (scales.shape[1], -1)).mul_(scales.float().unsqueeze(2))
    return full


def _is_float16(scale: Tensor) -> bool:
    return torch.equal(scale.half().float(), scale.float())


# --- files -----------------------------------------------------------------------------------------------------------


def block_entries(model: nn.Module, entries: Iterable[Entry]) -> list[Entry]:
    """The entries of the matrices of the linear layers of blocks, without routers."""
    parts = [part for block in model.modules() if isinstance(block, Block) for part in block.modules()]
    linear = {id(m.weight) for m in parts if isinstance(m, nn.Linear)}
    linear -= {id(m.router.weight) for m in parts if isinstance(m, MixtureOfExperts)}
    parameters = dict(model.named_parameters())
    return [entry for entry in entries if all(id(parameters[name]) in linear for name in entry.ours)]


def int4_names(model: nn.Module, entries: Iterable[Entry]) -> set[str]:
    """The stored tensors that int4 is for: matrices of the linear layers of blocks (not routers) in whole groups."""
    parameters = dict(model.named_parameters())
    names: set[str] = set()
    for entry in block_entries(model, entries):
        shapes = entry.op.shapes([parameters[name].shape for name in entry.ours])
        names |= {n for n, s in zip(entry.theirs, shapes, strict=True) if len(s) == 2 and s[1] % GROUP == 0}
    return names


def compress(
    tensors: Iterable[tuple[str, Tensor]], packed: Collection[str] = (), *, zero_points: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with the `packed` ones as int4 and every other matrix as int8, each with its scales; int4 with
    `zero_points` or without."""
    for name, tensor in tensors:
        if name in packed:
            ints, scale, zero_point = _groups(tensor)
            yield name + PACKED, pack_int4(ints)
            yield name + SCALE, scale
            if zero_points:
                yield name + ZERO_POINT, pack_rows_int4(zero_point)
            yield name + SHAPE, torch.tensor(tensor.shape)
        elif tensor.ndim == 2:
            ints, scale = compress_rows(tensor)
            yield name, ints
            yield name + SCALE, scale
        else:
            yield name, tensor


def _groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from -8 to 7 (out, in), scales and zero points (out, in/32): those that the weight keeps, or those of
    the least error without zero points."""
    if (kept := kept_integers(weight, "int4")) is not None and (zero_point := _zero_point(kept)) is not None:
        return kept.ints.to(torch.int8) - 8, kept.scale, zero_point
    scale = best_scales(weight)
    full = weight.float().unflatten(1, (-1, GROUP))
    ints = round_int4(full, scale.float().unsqueeze(2)).flatten(1).to(torch.int8)
    return ints, scale, torch.zeros_like(scale, dtype=torch.int8)


def _zero_point(kept: QuantizedWeight) -> Tensor | None:
    """The zero points of a weight in int4 as integers from -8 to 7, None if they are other numbers (as in Q4_1)."""
    assert kept.zero is not None
    scale = kept.scale.float()
    found = (-kept.zero.float() / torch.where(scale == 0, torch.ones_like(scale), scale)).round().clamp(-8, 7)
    return found.to(torch.int8) if torch.equal(-found * scale, kept.zero.float()) else None


def has_zero_points(weight: Tensor) -> bool:
    """Whether a parameter keeps integers with zero points that can be stored."""
    kept = kept_integers(weight, "int4")
    zero_point = None if kept is None else _zero_point(kept)
    return zero_point is not None and bool(zero_point.any())


class CompressedSource:
    """A `TensorSource` of floats over one of integers and scales; `dtype` is what config.json calls their type."""

    mapped, fresh = False, True

    def __init__(self, source: TensorSource, dtype: object = None) -> None:
        self.source = source
        self.kind = next((kind for kind in FLOATS if str(kind) == f"torch.{dtype}"), None)
        self.stored = names = set(source.names())
        self.scaled = {name for name in names if name + SCALE in names and source.dtype(name) == torch.int8}
        for name in self.scaled:
            rows, scale = source.shape(name)[:1], source.shape(name + SCALE)
            if len(source.shape(name)) != 2 or scale not in ((*rows, 1), rows):
                raise ValueError(f"{name}{SCALE} has shape {scale}: it must be a number for each row of {name}")
        self.packed = {n: self._shape(n, names) for n in (n.removesuffix(PACKED) for n in names if n.endswith(PACKED))}

    def _shape(self, name: str, names: set[str]) -> tuple[int, int]:
        """The shape of a packed matrix; ValueError if its tensors do not fit each other."""
        stored = self.source.shape(name + PACKED)
        if name in names or not {name + SCALE, name + SHAPE} <= names:
            raise ValueError(f"{name}{PACKED} must have {name}{SCALE} and {name}{SHAPE} beside it, and no {name}")
        if self.source.dtype(name + PACKED) != torch.int32 or len(stored) != 2:
            raise ValueError(f"{name}{PACKED} must be a matrix of int32, eight numbers in each")
        if self.source.dtype(name + SHAPE) not in (torch.int64, torch.int32) or self.source.shape(name + SHAPE) != (2,):
            raise ValueError(f"{name}{SHAPE} must be two integers")
        rows, columns = self.source.get(name + SHAPE).tolist()
        if rows != stored[0] or not 8 * (stored[1] - 1) < columns <= 8 * stored[1]:
            raise ValueError(f"{name}{SHAPE} is ({rows}, {columns}): {name}{PACKED} {stored} cannot be such a matrix")
        scale = self.source.shape(name + SCALE)
        if len(scale) != 2 or scale[0] != rows or not scale[1] or columns % scale[1]:
            raise ValueError(f"{name}{SCALE} has shape {scale}: each row of {columns} is in groups of the same size")
        if name + ZERO_POINT in names and (
            self.source.dtype(name + ZERO_POINT) != torch.int32
            or self.source.shape(name + ZERO_POINT) != (-(-rows // 8), scale[1])
        ):
            raise ValueError(f"{name}{ZERO_POINT} must be int32, those of eight rows in each, for every scale")
        return rows, columns

    def _zero_point(self, name: str) -> Tensor | None:
        """The zero points (out, groups) of a packed matrix, None if it has none."""
        if name + ZERO_POINT not in self.stored:
            return None
        return unpack_int4(self.source.get(name + ZERO_POINT).T, self.packed[name][0]).T

    def names(self) -> Iterable[str]:
        """The tensors' names, without the scales."""
        hidden = {name + SCALE for name in self.scaled}
        hidden |= {name + part for name in self.packed for part in (SCALE, SHAPE, PACKED, ZERO_POINT)}
        return [*(name for name in self.source.names() if name not in hidden), *self.packed]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.packed[name] if name in self.packed else self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a matrix is the one in config.json; if it has none, that of the scales."""
        if name not in self.scaled and name not in self.packed:
            return self.source.dtype(name)
        return self.kind or self.source.dtype(name + SCALE)

    def get(self, name: str) -> Tensor:
        """Read a tensor; a matrix is multiplied by its scales."""
        if name in self.packed:
            packed, scale = self.source.get(name + PACKED), self.source.get(name + SCALE)
            return multiply_int4(packed, scale, self.packed[name][1], self._zero_point(name)).to(self.dtype(name))
        stored = self.source.get(name)
        if name not in self.scaled:
            return stored.clone()
        return (stored * self.source.get(name + SCALE).view(-1, 1)).to(self.dtype(name))

    def integers(self, name: str) -> QuantizedWeight | None:
        """The integers of a matrix as the kernels take them; None if their groups or scales are others."""
        if name in self.packed:
            scale, columns = self.source.get(name + SCALE), self.packed[name][1]
            if columns // scale.shape[1] % GROUP or not _is_float16(scale):
                return None
            zero_point = self._zero_point(name)
            zero_point = torch.zeros(scale.shape) if zero_point is None else zero_point
            scale, zero_point = (x.repeat_interleave(columns // x.shape[1] // GROUP, 1) for x in (scale, zero_point))
            if not _is_float16(zero_point * scale.float()):
                return None
            return int4_weight(unpack_int4(self.source.get(name + PACKED), columns), scale, zero_point)
        if name not in self.scaled or not _is_float16(scale := self.source.get(name + SCALE).view(-1, 1)):
            return None
        ints = self.source.get(name).clone()
        return QuantizedWeight(ints, scale.half().repeat(1, -(-ints.shape[1] // GROUP)))

    def release(self, name: str) -> None:
        """A tensor was copied: its memory may be freed."""
        for part in (PACKED, SCALE, SHAPE) if name in self.packed else ("",):
            self.source.release(name + part)
