"""int8 weights in safetensors, in the layout of the hub's `compressed-tensors`: a quarter of float32's size.

A matrix (out, in) is stored as int8 and a scale for each row, `NAME_scale` (out, 1): symmetric, so that
weight = ints * scale. config.json tells by `quantization_config`. Loading multiplies, and the model is an ordinary one
of floats; `accelerate` may quantize it again for its kernels. Vectors (norms, biases) are stored as they are;
embeddings are matrices too. transformers reads such a model unless its head is the embedding: it cannot tie int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from heedful.weights.load import TensorSource

SCALE = "_scale"
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT8_CONFIG: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {**WEIGHTS, "dynamic": False},
            "format": "int-quantized",
        }
    },
    "ignore": [],
}


def is_int8(quantization: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` describes this layout."""
    groups = quantization.get("config_groups")
    if quantization.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or not groups:
        return False
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    known = [isinstance(w, Mapping) and all(w.get(key) == value for key, value in WEIGHTS.items()) for w in weights]
    return quantization.get("format") in ("int-quantized", "naive-quantized") and all(known)


def compress_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (out, in) and scales (out, 1) of a matrix: the largest of each row becomes 127."""
    full = weight.float()
    scale = full.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (full / scale).round().to(torch.int8), scale


def compress(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with every matrix as int8 and its scales."""
    for name, tensor in tensors:
        if tensor.ndim == 2:
            ints, scale = compress_rows(tensor)
            yield name, ints
            yield name + SCALE, scale
        else:
            yield name, tensor


class CompressedSource:
    """A `TensorSource` of floats over one of int8 and scales."""

    mapped, fresh = False, True

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        names = set(source.names())
        self.scaled = {name for name in names if name + SCALE in names and source.dtype(name) == torch.int8}
        for name in self.scaled:
            rows, scale = source.shape(name)[:1], source.shape(name + SCALE)
            if len(source.shape(name)) != 2 or scale not in ((*rows, 1), rows):
                raise ValueError(f"{name}{SCALE} has shape {scale}: it must be a number for each row of {name}")

    def names(self) -> Iterable[str]:
        """The tensors' names, without the scales."""
        scales = {name + SCALE for name in self.scaled}
        return [name for name in self.source.names() if name not in scales]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a matrix is that of its scales."""
        return self.source.dtype(name + SCALE if name in self.scaled else name)

    def get(self, name: str) -> Tensor:
        """Read a tensor; a matrix is multiplied by its scales."""
        stored = self.source.get(name)
        if name not in self.scaled:
            return stored.clone()
        return stored * self.source.get(name + SCALE).view(-1, 1)

    def release(self, name: str) -> None:
        """A tensor was copied: its memory may be freed."""
        self.source.release(name)
