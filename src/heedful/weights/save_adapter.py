"""Saving LoRA adapters in peft's format; adapter.py has the format, and loads it."""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import DecoderModel, EncoderDecoderModel, Model
from heedful.models.mapping import Entry
from heedful.nn.lora import LoRALinear, adapted
from heedful.weights.adapter import (
    CONFIG,
    PREFIX,
    TENSORS,
    HubNames,
    LowRankPair,
    check_linear,
    is_transposed,
    module_of,
)
from heedful.weights.save import write_safetensors


def save_adapter(model: Model, folder: str | Path, base_name: str = "") -> None:
    """Write a model's adapters, and parameters trained in full beside them, to a new or empty folder, atomically.

    `base_name` is the model that was adapted, by its name on the hub or its folder.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    aside.mkdir()
    try:
        write_adapter(aside, model, base_name)
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_adapter(folder: Path, model: Model, base_name: str = "") -> None:
    """Write the adapter's files into an existing folder, not atomically."""
    tensors, config = adapter_contents(model)
    own = {PREFIX + n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    write_safetensors(own, folder / TENSORS)
    config["base_model_name_or_path"] = base_name or None
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def adapter_contents(model: Model) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by the hub's names, and the config; ValueError if peft's format cannot hold what is trainable."""
    layers = adapted(model)
    if not layers:
        raise ValueError("the model has no adapters: save it whole with heedful.weights.save.save")
    names = HubNames(model)
    pairs = {
        their: _joined(names, entry, [layers.get(module_of(n)) for n in entry.ours])
        for their, entry in names.modules.items()
        if any(module_of(n) in layers for n in entry.ours)
    }
    tensors: dict[str, Tensor] = {}
    for their, pair in pairs.items():
        tensors |= {f"{their}.lora_A.weight": pair.a, f"{their}.lora_B.weight": pair.b}
    learned = {n: p for n, p in model.named_parameters() if p.requires_grad and module_of(n) not in layers}
    whole = names.whole_modules(learned)
    for entry in (e for entries in whole.values() for e in entries):
        theirs = entry.op.save([learned[n] for n in entry.ours])
        tensors |= dict(zip(entry.theirs, theirs, strict=True))
    return tensors, _config(model, names, pairs, list(whole))


def _joined(names: HubNames, entry: Entry, parts: Sequence[LoRALinear | None]) -> LowRankPair:
    """One adapter of the hub's matrix from those of our layers; None is a part that is not adapted."""
    check_linear(entry)
    layers = [p for p in parts if p is not None]
    rank, scale = sum(layer.rank for layer in layers), layers[0].scale
    rows, begin = [], 0
    for part, name in zip(parts, entry.ours, strict=True):
        block = layers[0].lora_b.new_zeros(names.shapes[name][0], rank)  # (N of this part, rank)
        if part is not None:
            block[:, begin : begin + part.rank] = part.lora_b.detach() * (part.scale / scale)
            begin += part.rank
        rows.append(block)
    b = entry.op.save(rows)[0]
    a = torch.cat([layer.lora_a.detach() for layer in layers])
    return LowRankPair(a, b.t() if is_transposed(entry) else b, scale)


def _config(model: Model, names: HubNames, pairs: Mapping[str, LowRankPair], whole: Sequence[str]) -> dict[str, Any]:
    (rank, alpha), _ = Counter((p.rank, p.alpha) for p in pairs.values()).most_common(1)[0]
    tasks = {DecoderModel: "CAUSAL_LM", EncoderDecoderModel: "SEQ_2_SEQ_LM"}
    task = next((name for kind, name in tasks.items() if isinstance(model, kind)), None)
    dropouts = {layer.dropout.p for layer in adapted(model).values()}
    return {
        "peft_type": "LORA",
        "task_type": task,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(dropouts),
        "target_modules": _short(pairs, names),
        "rank_pattern": _exceptions({n: p.rank for n, p in pairs.items()}, rank, names),
        "alpha_pattern": _exceptions({n: p.alpha for n, p in pairs.items()}, alpha, names),
        "modules_to_save": list(whole) or None,
        "fan_in_fan_out": any(is_transposed(names.modules[n]) for n in pairs),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }


def _short(chosen: Iterable[str], names: HubNames) -> list[str]:
    """The shortest suffixes of the modules' names that no other module has."""
    chosen = set(chosen)
    every = {module_of(t) for entry in names.entries for t in entry.theirs}
    found = set()
    for name in chosen:
        parts = name.split(".")
        after_number = max((i + 1 for i, part in enumerate(parts) if part.isdigit()), default=0)
        for end in (parts[-1], ".".join(parts[after_number:]), name):
            if {n for n in every if n == end or n.endswith("." + end)} <= chosen:
                found.add(end)
                break
    return sorted(found)


def _exceptions(values: Mapping[str, int | float], default: int | float, names: HubNames) -> dict[str, int | float]:
    """Values that differ from the default, by suffixes of the modules' names."""
    found: dict[str, int | float] = {}
    for value in set(values.values()) - {default}:
        found |= dict.fromkeys(_short((n for n, v in values.items() if v == value), names), value)
    return dict(sorted(found.items()))
