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
from heedful.weights.card import model_card
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
from heedful.weights.special_ids import generation_config, special_ids

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
    name: str | None = None,
    source: Path | None = None,
) -> None:
    """Write config.json, the weights in files of at most `max_shard` bytes (a single tensor may be larger), the
    tokenizer if there is one, and a card; `also` are more JSON files, by their paths in the folder. A folder that holds
    something is kept unless `overwrite` says that all of it may go. `quantize`: matrices in int8 or int4
    (`compressed`). `name` and `source`, the folder that the model was loaded from, are for the card."""
    if any(hasattr(module, "n_weights") for module in model.modules()):
        raise ValueError("the weights are packed: save the model as it was loaded")
    if any(map(is_sharded, model.parameters())):
        raise ValueError("the weights are divided over processes: load the model in one, and save that")
    if quantize not in (None, "int8", "int4"):
        raise ValueError(f"weights are quantized to int8 or int4, not to {quantize}")
    if quantize != "int4":  # whose groups of inputs keep their order
        model = hub_equivalent(model, tokenizer)
    with new_folder(Path(folder), overwrite=overwrite) as aside:
        config = write_folder(aside, model, tokenizer, max_shard, quantize=quantize)
        for file, content in (also or {}).items():
            (aside / file).parent.mkdir(exist_ok=True)
            _write_json(aside / file, content)
        reason = own_layout_reason(model, quantize)
        card = model_card(model, tokenizer, config, name=name or Path(folder).name, source=source, own_layout=reason)
        (aside / "README.md").write_text(card, encoding="utf-8")


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


def hub_config(model: Model, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The contents of config.json: in the hub's layout if it has one for this model, else in ours."""
    if _no_hub_layout(model) is not None:
        return own_config(model, tokenizer)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {**special_ids(model, tokenizer), **model.config.to_hub(), "dtype": dtype}


def own_config(model: Model, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The contents of config.json in our own layout, which has a model's own names and settings."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    ids = special_ids(model, tokenizer)
    return {**ids, "model_type": OWN, "family": model.family, **model.config.to_dict(), "dtype": dtype}


def hub_equivalent(model: Model, tokenizer: Tokenizer | None = None) -> Model:
    """A model with the same outputs that the hub has a layout for, if it has none for this one but for such another."""
    if model.config.hub is None:
        return model
    pad = special_ids(model, tokenizer).get("pad_token_id")
    other: Model = model.config.hub.equivalent(model, pad)
    return other


def own_layout_reason(model: Model, quantize: Quantized | None = None) -> str | None:
    """Why a model is written in our own layout, which transformers does not read; None if it is in the hub's."""
    reason = _no_hub_layout(model)
    if reason is None and quantize == "int4":
        entries = block_entries(model, model.weight_map().entries(dict(model.named_parameters())))
        if not all(entry.op.by_rows for entry in entries):
            return f"the hub's layout of a {model.family} has transposed matrices, which int4 has no groups for"
    return reason


def _no_hub_layout(model: Model) -> str | None:
    if model.config.hub is None:
        return f"transformers has no model like a {model.family}"
    try:
        model.config.to_hub()
    except ValueError as error:
        return str(error)
    return None


def config_and_weight_map(
    model: Model, quantize: Quantized | None = None, tokenizer: Tokenizer | None = None
) -> tuple[dict[str, Any], WeightMap]:
    """config.json and the weight map that belongs to it: ours where the hub has no layout for the model, or has one
    with transposed matrices, whose inputs could not be in groups of int4."""
    if own_layout_reason(model, quantize) is not None:
        return own_config(model, tokenizer), identity(dict(model.named_parameters()))
    return hub_config(model, tokenizer), model.weight_map()


def write_folder(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer | None = None,
    max_shard: int = MAX_SHARD,
    *,
    quantize: Quantized | None = None,
) -> dict[str, Any]:
    """Write the model's files into an existing folder, not atomically; returns what config.json has."""
    refuse_adapted(model, "saved whole")
    config, weights = config_and_weight_map(model, quantize, tokenizer)
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
    write_config(folder, model, tokenizer, config)
    if tokenizer is not None:
        save_tokenizer(folder, tokenizer, model)
    return config


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


def write_config(
    folder: Path, model: Model, tokenizer: Tokenizer | None = None, config: dict[str, Any] | None = None
) -> None:
    """Write config.json (the hub's unless given) and, for a model that generates or reads images,
    generation_config.json and preprocessor_config.json."""
    _write_json(folder / "config.json", config or hub_config(model, tokenizer))
    if generation := generation_config(model, tokenizer):
        _write_json(folder / "generation_config.json", generation)
    hub = model.config.hub
    if preprocessor := model.preprocessor or (hub.preprocessor(model.config) if hub else {}):
        _write_json(folder / "preprocessor_config.json", preprocessor)


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
