"""How much memory a model takes: before it is loaded, by its files and their shapes alone, and afterwards.

weights        as stored, or as `quantize` packs them (weights/pack.py); a packed head is apart from its table
key/value pool what all answers together may come to remember: a bound, taken bit by bit
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from heedful.kernels.packed import Kind
from heedful.models.base import GenerativeModel, Model
from heedful.nn.block import Block
from heedful.train.cost import free_memory
from heedful.weights.adapted import base_of, is_adapter
from heedful.weights.folder import weight_files
from heedful.weights.gguf_file import GgufFile
from heedful.weights.meta import load_meta
from heedful.weights.resolve import resolve

PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "int4": 0.625}
SHARE = 0.8  # of the memory there is, for models; the rest is for what a pass needs, and for others
USUAL = 2048  # tokens of one answer with its prompt, where the model has no end


@dataclass(frozen=True)
class Need:
    """What a model needs, in bytes."""

    abilities: tuple[str, ...]
    weights: int
    per_token: int  # of what an answer remembers
    context: int  # tokens that there must be room for: the longest answer's, if nobody says otherwise

    @property
    def least(self) -> int:
        """With the smallest pool."""
        return self.weights + self.per_token * self.context


def budget(memory: float | None, device: str | None) -> int | None:
    """Bytes for all models together: what was given in GB, or most of what there is; None where nobody knows."""
    if memory is not None:
        return int(memory * 1e9)
    free = free_memory(device or "cpu")
    return None if free is None else int(free * SHARE)


def need_of(path: Path, quantize: Kind | None = None, cache_tokens: int | None = None) -> Need:
    """What the model at a folder or a GGUF file will need; its weights are not read."""
    model = load_meta(path)
    weights = float(stored(path)) if quantize is None else model.n_parameters() * PER_WEIGHT[quantize]
    if quantize is not None or isinstance(model, GenerativeModel):
        # It will be packed, and a head that shares its numbers with the table is packed apart from it.
        twice = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
        weights *= twice / max(1, model.n_parameters())
    context = cache_tokens or min(model.longest or USUAL, USUAL)
    return Need(model.abilities, math.ceil(weights), per_token(model), context)


def stored(path: Path) -> int:
    """Bytes that the weights take as they are stored, in memory."""
    if path.is_dir() and is_adapter(path):
        return stored(resolve(base_of(path)))
    if path.is_dir() and (path / "config.json").exists():
        return sum(file.stat().st_size for file in weight_files(path))
    with GgufFile(next(iter(sorted(path.glob("*.gguf"))), path) if path.is_dir() else path) as file:
        return sum(math.prod(file.shape(name)) * file.dtype(name).itemsize for name in file.names())


def per_token(model: Model) -> int:
    """Bytes that one more token of one answer may take: keys and values in float32, of the target and the source."""
    if "generate" not in model.abilities:
        return 0
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    caches = [part for block in blocks for part in (block.attention, block.cross) if part is not None]
    return sum(2 * 4 * cache.n_kv_heads * cache.d_head for cache in caches)


def pool_tokens(need: Need, max_rows: int, room: float) -> int:
    """How many tokens all answers may remember: all rows their fill, unless that is more than the room there is."""
    most = max_rows * need.context
    return most if most * need.per_token <= room else max(need.context, int(room / need.per_token))
