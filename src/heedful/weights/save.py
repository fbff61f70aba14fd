"""Writing a model as a folder in the hub's layout, which transformers' from_pretrained reads.

Families that have no layout there are written with our own names and settings. The folder is written
atomically: aside, then renamed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from heedful.kernels.quantize import keep_integers, kept_integers
from heedful.models.base import Model
from heedful.models.encoder import has_segments
from heedful.models.mapping import Entry, WeightMap, identity
from heedful.nn.lora import refuse_adapted
from heedful.text.tokenizer import Tokenizer
from heedful.weights.compressed import (
    INT4_BYTES,
    Quantized,
    block_entries,
    compress,
    has_zero_points,
    int4_names,
    quantization_config,
)
from heedful.weights.folder import OWN
from heedful.weights.integers import convert_integers
from heedful.weights.load import is_sharded

MAX_SHARD = 5 * 10**9


def save(
    model: Model,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard: int = MAX_SHARD,
    overwrite: bool = False,
    quantize: Quantized | None = None,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json, the weights in files of at most `max_shard` bytes (a single tensor may be larger), and the
    tokenizer if there is one; `also` are more JSON files, by their paths in the folder. A folder that holds something
    is kept unless `overwrite` says that all of it may go. `quantize`: matrices in int8 or int4 (`compressed`)."""
    if any(hasattr(module, "n_weights") for module in model.modules()):
        raise ValueError("the weights are packed: save the model as it was loaded")
    if any(map(is_sharded, model.parameters())):
        raise ValueError("the weights are divided over processes: load the model in one, and save that")
    if quantize not in (None, "int8", "int4"):
        raise ValueError(f"weights are quantized to int8 or int4, not to {quantize}")
    with new_folder(Path(folder), overwrite=overwrite) as aside:
        write_folder(aside, model, tokenizer, max_shard, quantize=quantize)
        for name, content in (also or {}).items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end; after an error nothing of it stays."""
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not overwrite)):
        raise ValueError(f"{folder} exists and is not empty: choose another name, or overwrite=True replaces it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    aside.mkdir()
    try:
        yield aside
        _sync(aside)
        _put_in_place(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def hub_config(model: Model) -> dict[str, Any]:
    """The contents of config.json: in the hub's layout if it has one for this model, else in ours."""
    try:
        hub = model.config.to_hub()
    except ValueError:
        hub = {}
    if "model_type" not in hub:
        return own_config(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {**model.special, **hub, "dtype": dtype}


def own_config(model: Model) -> dict[str, Any]:
    """The contents of config.json in our own layout, which has a model's own names and settings."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {**model.special, "model_type": OWN, "family": model.family, **model.config.to_dict(), "dtype": dtype}


def config_and_weight_map(model: Model, quantize: Quantized | None = None) -> tuple[dict[str, Any], WeightMap]:
    """config.json and the weight map that belongs to it: ours where the hub has no layout for the model, or has one
    with transposed matrices, whose inputs could not be in groups of int4."""
    config, names = hub_config(model), dict(model.named_parameters())
    if config["model_type"] == OWN:
        return config, identity(names)
    weights = model.weight_map()
    if quantize == "int4" and not all(entry.op.by_rows for entry in block_entries(model, weights.entries(names))):
        return own_config(model), identity(names)
    return config, weights


def write_folder(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer | None = None,
    max_shard: int = MAX_SHARD,
    *,
    quantize: Quantized | None = None,
) -> None:
    """Write the model's files into an existing folder, not atomically."""
    refuse_adapted(model, "saved whole")
    config, weights = config_and_weight_map(model, quantize)
    parameters = dict(model.named_parameters())
    entries = weights.entries(parameters)
    packed = int4_names(model, entries) if quantize == "int4" else set()
    zero_points = bool(packed) and any(map(has_zero_points, parameters.values()))
    shards = _shards(entries, parameters, max_shard, quantize, packed)
    names: dict[str, str] = {}
    total = 0
    for i, entries in enumerate(shards):
        alone = len(shards) == 1
        file = "model.safetensors" if alone else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        named = _theirs(entries, parameters)
        tensors = dict(compress(named, packed, zero_points=zero_points) if quantize else named)
        write_safetensors(tensors, folder / file)
        names |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": names}
        _write_json(folder / "model.safetensors.index.json", index)
    if quantize:
        config["quantization_config"] = quantization_config(packed, zero_points=zero_points)
    write_config(folder, model, config)
    if tokenizer is not None:
        save_tokenizer(folder, tokenizer, model)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, model: Model) -> None:
    """Write a model's tokenizer: with the inputs that transformers' class of the model takes, and its context."""
    kind = hub_config(model)["model_type"]
    tokenizer.save(folder, model_type=kind, segments=has_segments(model), max_length=model.context_length)


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with its folder's permissions (the library makes it readable by its owner alone)."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is told in its message alone
        if told := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error
        raise
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_config(folder: Path, model: Model, config: dict[str, Any] | None = None) -> None:
    """Write config.json (the hub's unless given) and, where the model has them, generation_config.json and
    preprocessor_config.json."""
    _write_json(folder / "config.json", config or hub_config(model))
    if model.generation:
        _write_json(folder / "generation_config.json", model.generation)
    if model.preprocessor:
        _write_json(folder / "preprocessor_config.json", model.preprocessor)


def _shards(
    entries: list[Entry], parameters: Mapping[str, Tensor], max_shard: int, quantize: Quantized | None, packed: set[str]
) -> list[list[Entry]]:
    """The entries in order, cut where a file would grow past `max_shard`."""
    shards: list[list[Entry]] = [[]]
    size = 0.0
    for entry in entries:
        tensors = [parameters[name] for name in entry.ours]
        small = INT4_BYTES if packed.issuperset(entry.theirs) else 1 if quantize else None
        n = sum(t.numel() * (small or t.element_size()) for t in tensors)
        if shards[-1] and size + n > max_shard:
            shards.append([])
            size = 0.0
        shards[-1].append(entry)
        size += n
    return shards


def _theirs(entries: list[Entry], parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for entry in entries:
        ours = [parameters[name] for name in entry.ours]
        theirs = [own_memory(tensor) for tensor in entry.op.save([tensor.detach() for tensor in ours])]
        if entry.op.by_rows and (kept := convert_integers(entry.op.save, [kept_integers(p, "int4") for p in ours])):
            for tensor, integers in zip(theirs, kept, strict=True):
                keep_integers(tensor, integers)
        yield from zip(entry.theirs, theirs, strict=True)


def own_memory(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a part of a larger one: safetensors refuses tensors that share memory."""
    whole = tensor.contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """fsync every file: the rename must not reach the disk before the contents do."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())


def _put_in_place(aside: Path, folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
        return
    old = aside.with_suffix(".old")
    folder.rename(old)
    try:
        aside.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old)
