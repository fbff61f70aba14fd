"""The memory budget: how much a model takes, estimated before it is loaded from its files and shapes alone.

weights    as stored, or as `quantize` packs them; a packed output head no longer shares memory with the embedding
KV cache   for all answers together, in float32 or as `kv_cache` says: an upper bound, allocated as it fills
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from heedful.kernels.accelerate import can_be_packed
from heedful.kernels.device import choose_device
from heedful.kernels.options import TENSOR_PARALLEL
from heedful.kernels.packed import Precision
from heedful.nn.int8_cache import CacheType
from heedful.train.cost import free_memory
from heedful.weights.adapter import base_of, is_adapter
from heedful.weights.folder import read_config, tensor_source, weight_files
from heedful.weights.gguf_file import GgufFile
from heedful.weights.load import TensorSource
from heedful.weights.meta import load_meta
from heedful.weights.resolve import resolve_model
from heedful.weights.safetensors_file import SafetensorsFiles

BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "int4": 0.625}
SHARE = 0.8  # of the free memory, for models; the rest is for activations and other programs
DEFAULT_CONTEXT = 2048  # most tokens of one answer with its prompt that are reserved for


@dataclass(frozen=True)
class MemoryEstimate:
    """What a model needs, in bytes, and what it can do."""

    abilities: tuple[str, ...]
    weights: int
    per_token: int  # of the KV cache
    context: int  # tokens that the KV cache must hold at least: the longest answer's, unless --cache-tokens says
    context_length: int | None = None  # the most tokens that the model reads, None if there is no limit

    def divided(self, n_processes: int) -> MemoryEstimate:
        """What each of several processes needs that share the model."""
        weights, per_token = self.weights // n_processes, self.per_token // n_processes
        abilities = tuple(ability for ability in self.abilities if n_processes == 1 or ability in TENSOR_PARALLEL)
        return replace(self, abilities=abilities, weights=weights, per_token=per_token)

    @property
    def minimum(self) -> int:
        """Weights and the smallest KV cache."""
        return self.weights + self.per_token * self.context


def memory_budget(gigabytes: float | None, device: str) -> int | None:
    """Bytes for all models together: as given, else most of the free memory; None if that is unknown."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    free = free_memory(choose_device(device))
    return None if free is None else int(free * SHARE)


def estimate_memory(
    path: Path,
    quantize: Precision | None = None,
    cache_tokens: int | None = None,
    context_length: int | None = None,
    kv_cache: CacheType | None = None,
) -> MemoryEstimate:
    """What the model in a folder or a GGUF file will need; its weights are not read."""
    model = load_meta(path)
    if context_length is not None:
        model.set_context_length(context_length)
    weights = float(stored_bytes(path)) if quantize is None else model.n_parameters() * BYTES_PER_WEIGHT[quantize]
    if quantize is not None or can_be_packed(model):  # then a tied head is a copy of its own
        untied = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
        weights *= untied / max(1, model.n_parameters())
    context = cache_tokens or min(model.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    per_token = model.kv_bytes_per_token(kv_cache)
    return MemoryEstimate(model.abilities, math.ceil(weights), per_token, context, model.context_length)


def stored_bytes(path: Path) -> int:
    """Bytes of the weights in memory: in the precision they are stored in, floats where that is int8 or int4."""
    if path.is_dir() and is_adapter(path):
        return stored_bytes(resolve_model(base_of(path)))
    if path.is_dir() and (path / "config.json").exists():
        hub = read_config(path)
        with SafetensorsFiles(weight_files(path)) as files:
            return count_bytes(tensor_source(files, hub))
    with GgufFile(next(iter(sorted(path.glob("*.gguf"))), path) if path.is_dir() else path) as file:
        return count_bytes(file)


def count_bytes(source: TensorSource | GgufFile) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(source.shape(name)) * source.dtype(name).itemsize for name in source.names())


def kv_cache_tokens(estimate: MemoryEstimate, max_rows: int, available: float) -> int:
    """How many tokens the KV cache gets: `context` for every row, or fewer if so many bytes are not available."""
    most = max_rows * estimate.context
    if most * estimate.per_token <= available:
        return most
    return max(estimate.context, int(available / estimate.per_token))
