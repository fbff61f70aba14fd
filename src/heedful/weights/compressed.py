"""int8 and int4 weights in safetensors, in the layout of the hub's `compressed-tensors`.

int8    a matrix (out, in) as int8, with a scale for each row, `NAME_scale` (out, 1): a quarter of float32's size
int4    eight numbers in an int32, `NAME_packed` (out, in/8), a float16 scale for each 32 inputs, `NAME_scale`
        (out, in/32), and `NAME_shape`: 4.5 bits a number. For the linear layers of blocks; other matrices (embeddings,
        heads) are int8, since every prediction depends on them

Both are symmetric, weight = ints * scale, and config.json tells by `quantization_config`. Loading multiplies, and the
model is an ordinary one of floats, of the type that config.json names; `accelerate` may quantize it again for its
kernels. Vectors (norms, biases) are stored as they are. transformers reads such a model unless its head is the
embedding: it cannot tie int8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful.models.mapping import Entry
from heedful.nn.block import Block
from heedful.nn.feedforward import MixtureOfExperts
from heedful.weights.load import FLOATS, TensorSource

Quantized = Literal["int8", "int4"]

SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"
GROUP = 32  # inputs that share a scale in int4
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
# Where the largest of a group may go: a little inside and outside of the 16 integers, which reach further below.
LARGEST = [-8 + i / 4 for i in range(-3, 9)] + [7 + i / 2 for i in range(-2, 3)]


def quantization_config(packed: Collection[str] = ()) -> dict[str, Any]:
    """config.json's `quantization_config` of a model with these tensors in int4 and its other matrices in int8."""
    groups = {"group_0": INT8}
    if packed:
        targets = sorted({"re:" + re.sub(r"\d+", r"\\d+", re.escape(n.removesuffix(".weight"))) + "$" for n in packed})
        groups = {"group_0": {"targets": targets, **INT4}, "group_1": INT8}
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
    if not isinstance(weights, Mapping) or any(weights.get(key) != value for key, value in SYMMETRIC.items()):
        return False
    kind = weights.get("num_bits"), weights.get("strategy")
    if layout == "pack-quantized":
        return kind in ((4, "group"), (4, "channel"))
    return kind == (8, "channel") and layout in ("int-quantized", "naive-quantized")


# --- numbers ---------------------------------------------------------------------------------------------------------


def compress_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (out, in) and scales (out, 1) of a matrix: the largest of each row becomes 127."""
    full = weight.float()
    scale = full.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (full / scale).round().to(torch.int8), scale


def compress_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -8 to 7 (out, in) and float16 scales (out, in/32) of the least squared error among some.

    The largest of a group is put at or near -8, where the scale has the other sign, or 7. The integers that follow
    have a best scale, which is tried too.
    """
    full = weight.float().unflatten(1, (-1, GROUP))  # (out, groups, 32)
    largest = full.gather(2, full.abs().argmax(2, keepdim=True))
    kind = torch.float16 if 2**-10 < largest.abs().max() < 2**18 else torch.bfloat16  # where float16 is fine enough
    best = torch.full_like(largest, torch.inf)
    ints, scales = torch.zeros_like(full), torch.ones_like(largest, dtype=kind)
    for place in LARGEST:
        scale = (largest / place).to(kind)
        for _ in range(2):
            found = (full / _nonzero(scale).float()).round_().clamp_(-8, 7)
            error = (found * scale.float() - full).square_().sum(2, keepdim=True)
            better = error < best
            best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
            ints = torch.where(better, found, ints)
            scale = ((found * full).sum(2, keepdim=True) / found.square().sum(2, keepdim=True).clamp_min(1)).to(kind)
    return ints.flatten(1).to(torch.int8), scales.squeeze(2)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def pack_int4(ints: Tensor) -> Tensor:
    """Integers from -8 to 7 (out, in) -> int32 (out, in/8): q + 8 in four bits, the first in the lowest."""
    unsigned = (ints + 8).to(torch.uint8)
    return (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).view(torch.int32)


def multiply_int4(packed: Tensor, scales: Tensor, n: int) -> Tensor:
    """The matrix (out, n) in float32 of packed integers (out, at least n/8) and scales (out, groups)."""
    pairs = packed.contiguous().view(torch.uint8)
    full = torch.empty(*pairs.shape, 2)
    full[..., 0], full[..., 1] = pairs & 15, pairs >> 4
    full = full.flatten(1)[:, :n].sub_(8)
    full.unflatten(1, (scales.shape[1], -1)).mul_(scales.float().unsqueeze(2))
    return full


# --- files -----------------------------------------------------------------------------------------------------------


def int4_names(model: nn.Module, entries: Iterable[Entry]) -> set[str]:
    """The stored tensors that int4 is for: matrices of the linear layers of blocks (not routers) in whole groups."""
    parts = [part for block in model.modules() if isinstance(block, Block) for part in block.modules()]
    linear = {id(m.weight) for m in parts if isinstance(m, nn.Linear)}
    linear -= {id(m.router.weight) for m in parts if isinstance(m, MixtureOfExperts)}
    parameters = dict(model.named_parameters())
    names: set[str] = set()
    for entry in entries:
        if all(id(parameters[name]) in linear for name in entry.ours):
            shapes = entry.op.shapes([parameters[name].shape for name in entry.ours])
            names |= {n for n, s in zip(entry.theirs, shapes, strict=True) if len(s) == 2 and s[1] % GROUP == 0}
    return names


def compress(tensors: Iterable[tuple[str, Tensor]], packed: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with the `packed` ones as int4 and every other matrix as int8, each with its scales."""
    for name, tensor in tensors:
        if name in packed:
            ints, scale = compress_groups(tensor)
            yield name + PACKED, pack_int4(ints)
            yield name + SCALE, scale
            yield name + SHAPE, torch.tensor(tensor.shape)
        elif tensor.ndim == 2:
            ints, scale = compress_rows(tensor)
            yield name, ints
            yield name + SCALE, scale
        else:
            yield name, tensor


class CompressedSource:
    """A `TensorSource` of floats over one of integers and scales; `dtype` is what config.json calls their type."""

    mapped, fresh = False, True

    def __init__(self, source: TensorSource, dtype: object = None) -> None:
        self.source = source
        self.kind = next((kind for kind in FLOATS if str(kind) == f"torch.{dtype}"), None)
        names = set(source.names())
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
        return rows, columns

    def names(self) -> Iterable[str]:
        """The tensors' names, without the scales."""
        hidden = {name + SCALE for name in self.scaled}
        hidden |= {name + part for name in self.packed for part in (SCALE, SHAPE, PACKED)}
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
            return multiply_int4(packed, scale, self.packed[name][1]).to(self.dtype(name))
        stored = self.source.get(name)
        if name not in self.scaled:
            return stored.clone()
        return (stored * self.source.get(name + SCALE).view(-1, 1)).to(self.dtype(name))

    def release(self, name: str) -> None:
        """A tensor was copied: its memory may be freed."""
        for part in (PACKED, SCALE, SHAPE) if name in self.packed else ("",):
            self.source.release(name + part)
