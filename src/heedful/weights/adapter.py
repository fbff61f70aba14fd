"""Adapters alone, in the format of the `peft` library: adapter_config.json and adapter_model.safetensors.

The names are the hub's, so an adapter trained here runs on the reference model, and one trained there runs here. Where
the hub has one matrix for several of ours (GPT-2's c_attn is our query, key and value), theirs is one adapter for all:

    ours -> theirs   A stacked, B block by block: [Bq 0 0; 0 Bk 0; 0 0 Bv], its rank the sum of ours
    theirs -> ours   the same A for each, and B cut as the weight would be

The second gives each of ours the whole rank, unless the zeros show that it was written by the first. What learned in
full beside the adapter (a new head) is kept under its own name, peft's `modules_to_save`.

peft goes by the names that the reference has in memory. From transformers 5 on ViT's are not those of its files: we
write the files' and read both, so a ViT's adapter goes from peft to us but not back.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import DecoderModel, EncoderDecoderModel, Model
from heedful.models.mapping import Copy, Entry, Fuse, FuseHeads, Transpose
from heedful.nn.lora import LoRALinear, adapted, replace_module
from heedful.weights.folder import HOW_TO_CONVERT, PICKLES, SkipInit, read_json, regular_file
from heedful.weights.safetensors_file import SafetensorsFiles
from heedful.weights.save import config_and_weight_map, write_safetensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of peft that would make of an adapter something else than W + scale · B A; each with what it may be.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others begin from a W that is not the model's
    **dict.fromkeys(
        ["use_dora", "lora_bias", "use_qalora", "target_parameters", "trainable_token_indices", "layer_replication",
         "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config"],
        (),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class LowRankPair:
    """A (rank, K), B (N, rank), and what their product is multiplied with."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def alpha(self) -> int | float:
        alpha = self.scale * self.rank
        return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def save_adapter(model: Model, folder: str | Path, base_name: str = "") -> None:
    """Write a model's adapters, and what learned in full beside them, as a folder that is new or empty.

    `base_name` is the model they belong to, by its name on the hub or its folder.
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
    """The adapter's files in a folder that is there; who calls it sees to it that nobody reads them half written."""
    tensors, config = adapter_contents(model)
    own = {PREFIX + n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    write_safetensors(own, folder / TENSORS)
    config["base_model_name_or_path"] = base_name or None
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def adapter_contents(model: Model) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by the hub's names, and the config; ValueError if the format cannot hold what learns."""
    layers = adapted(model)
    if not layers:
        raise ValueError("the model has no adapters: save it whole with heedful.weights.save.save")
    names = HubNames(model)
    pairs = {
        their: _joined(names, entry, [layers.get(_module(n)) for n in entry.ours])
        for their, entry in names.modules.items()
        if any(_module(n) in layers for n in entry.ours)
    }
    tensors: dict[str, Tensor] = {}
    for their, pair in pairs.items():
        tensors |= {f"{their}.lora_A.weight": pair.a, f"{their}.lora_B.weight": pair.b}
    learned = {n: p for n, p in model.named_parameters() if p.requires_grad and _module(n) not in layers}
    whole = names.whole_modules(learned)
    for entry in (e for entries in whole.values() for e in entries):
        theirs = entry.op.save([learned[n] for n in entry.ours])
        tensors |= dict(zip(entry.theirs, theirs, strict=True))
    return tensors, _config(model, names, pairs, list(whole))


def load_adapter(model: Model, folder: str | Path, *, quantized: bool = False) -> list[str]:
    """Put the adapter in a folder on a model of the kind it was made for; the names of the adapted layers.

    A model that has adapters already, on the same layers and of the same ranks, gets the folder's numbers for them;
    another gets new ones, beside weights of 4 bits if `quantized`. After it the adapter learns and the rest does not.
    """
    folder = Path(folder)
    config = read_adapter_config(folder)
    names, have = HubNames(model), adapted(model)
    with SafetensorsFiles([regular_file(folder, TENSORS)]) as source:
        tensors = {n.removeprefix(PREFIX): source.get(n).clone() for n in source.names()}
    pairs = _read_pairs(names, tensors, config, have)
    whole = _read_whole(names, tensors)
    if tensors:
        raise ValueError(f"the adapter in {folder} has what this model has not: {_some(sorted(tensors))}")
    if have and {n: m.rank for n, m in have.items()} != {n: p.rank for n, p in pairs.items()}:
        raise ValueError(f"the adapter in {folder} is of other layers or ranks than the one that the model has")
    model.requires_grad_(False)
    for name, pair in pairs.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, LoRALinear):
            assert isinstance(layer, nn.Linear)
            new = LoRALinear(layer, pair.rank, pair.alpha, quantized=quantized).train(layer.training)
            replace_module(model, name, new)
            layer = new
        layer.alpha = float(pair.alpha)
        for parameter, value in ((layer.lora_a, pair.a), (layer.lora_b, pair.b)):
            parameter.data.copy_(value)
            parameter.requires_grad_(True)
    for name, tensor in whole.items():
        learned = model.get_parameter(name)
        learned.data.copy_(tensor)
        learned.requires_grad_(True)
    return list(pairs)


class HubNames:
    """Our modules and theirs, asked of a twin without memory: a model with adapters has other parameters."""

    def __init__(self, model: Model) -> None:
        with torch.device("meta"), SkipInit():
            twin = type(model)(model.config)
        self.weights = config_and_weight_map(twin)[1]
        self.shapes = {n: p.shape for n, p in twin.named_parameters()}
        self.entries = self.weights.entries(self.shapes)
        linear = {n for n, m in twin.named_modules() if isinstance(m, nn.Linear)}
        # Their modules that are one linear layer of ours, or several.
        self.modules = {
            _module(e.theirs[0]): e
            for e in self.entries
            if e.theirs[0].endswith(".weight") and all(_module(n) in linear for n in e.ours)
        }

    def whole_modules(self, learned: Mapping[str, object]) -> dict[str, list[Entry]]:
        """Their modules of which every tensor learned; ValueError if only some did."""
        found: dict[str, list[Entry]] = {
            _module(e.theirs[0]): [] for e in self.entries if any(n in learned for n in e.ours)
        }
        for entry in self.entries:
            for module in found:
                if entry.theirs[0].startswith(module + "."):
                    missing = [n for n in entry.ours if n not in learned]
                    if missing:
                        raise ValueError(
                            f"peft's format keeps whole modules: {_some(missing)} must learn too, as a part of {module}"
                        )
                    found[module].append(entry)
        return found

    def spellings(self, names: Iterable[str]) -> Callable[[str], str | None]:
        """Which of our map's `names` a file's name is; a model that was saved without its head lacks the prefix."""
        prefix = self.weights.prefix
        known = {n: n for n in names}
        for name in list(known):
            known.setdefault(name.removeprefix(prefix), name)
            known.setdefault(prefix + name, name)
        return lambda name: known.get(self.weights.current(name))


# --- writing ---------------------------------------------------------------------------------------------------------


def _joined(names: HubNames, entry: Entry, parts: Sequence[LoRALinear | None]) -> LowRankPair:
    """One adapter of theirs from ours; None is a part of their matrix that is not adapted."""
    _check_linear(entry)
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
    return LowRankPair(a, b.t() if _is_transposed(entry) else b, scale)


def _check_linear(entry: Entry) -> None:
    if not isinstance(entry.op, Copy | Transpose | Fuse | FuseHeads):
        raise ValueError(
            f"{_module(entry.ours[0])} is no linear layer in the hub's layout ({entry.theirs[0]}): do not adapt it"
        )


def _is_transposed(entry: Entry) -> bool:
    op = entry.op.inner if isinstance(entry.op, Fuse) else entry.op
    return isinstance(op, Transpose)


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
        "fan_in_fan_out": any(_is_transposed(names.modules[n]) for n in pairs),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }


def _short(chosen: Iterable[str], names: HubNames) -> list[str]:
    """The modules by the ends of their names, as far as no other module ends so."""
    chosen = set(chosen)
    every = {_module(t) for entry in names.entries for t in entry.theirs}
    found = set()
    for name in chosen:
        parts = name.split(".")
        after_number = max((i + 1 for i, part in enumerate(parts) if part.isdigit()), default=0)
        for end in (parts[-1], ".".join(parts[after_number:]), name):
            if {n for n in every if n == end or n.endswith("." + end)} <= chosen:
                found.add(end)
                break
    return sorted(found)


def _exceptions(values: Mapping[str, int | float], usual: int | float, names: HubNames) -> dict[str, int | float]:
    """What differs from the usual, by the ends of the names."""
    found: dict[str, int | float] = {}
    for value in set(values.values()) - {usual}:
        found |= dict.fromkeys(_short((n for n, v in values.items() if v == value), names), value)
    return dict(sorted(found.items()))


# --- reading ---------------------------------------------------------------------------------------------------------


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; ValueError if it is of another kind than LoRA, or of one that changes what LoRA is."""
    if not (folder / TENSORS).exists():
        pickles = [p.name for p in folder.glob("adapter_model.*") if p.suffix in PICKLES]
        if pickles:
            raise ValueError(f"{folder} has no {TENSORS}, only {', '.join(pickles)}. {HOW_TO_CONVERT}")
    config = read_json(folder, CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"the adapter in {folder} is of the kind {str(kind)[:50]!r}: only LORA is supported")
    for setting, plain in PLAIN.items():
        value = config.get(setting)
        if value and value not in plain:
            raise ValueError(f"an adapter with {setting} {str(value)[:100]!r} is not supported")
    numbers: list[Any] = [config.get("r"), config.get("lora_alpha")]
    for pattern in (config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")):
        if not isinstance(pattern, dict) or any(re.search(r"[^\w.-]", name) for name in pattern):
            raise ValueError(f"{CONFIG}: rank_pattern and alpha_pattern must be tables of modules' names")
        numbers += pattern.values()
    if not all(type(n) in (int, float) and math.isfinite(n) and n > 0 for n in numbers):
        raise ValueError(f"{CONFIG}: r, lora_alpha and their patterns must be numbers above 0")
    return config


def _read_pairs(
    names: HubNames, tensors: dict[str, Tensor], config: Mapping[str, Any], have: Mapping[str, LoRALinear]
) -> dict[str, LowRankPair]:
    """The adapters by our layers' names; their tensors are taken out of `tensors`."""
    which = names.spellings(f"{their}.weight" for their in names.modules)
    found: dict[str, LowRankPair] = {}
    for name in [n for n in tensors if n.endswith(".lora_A.weight")]:
        given = name.removesuffix(".lora_A.weight")
        their = which(f"{given}.weight")
        if their is None or f"{given}.lora_B.weight" not in tensors:
            continue  # said together with what else is left
        a, b = tensors.pop(name), tensors.pop(f"{given}.lora_B.weight")
        entry = names.modules[_module(their)]
        _check_linear(entry)
        rank = _setting(config, "rank_pattern", "r", given)
        outputs = sum(names.shapes[n][0] for n in entry.ours)
        wanted = ((rank, names.shapes[entry.ours[0]][1]), (outputs, rank))
        if (tuple(a.shape), tuple(b.shape)) != wanted:
            raise ValueError(f"{given}: A {list(a.shape)} and B {list(b.shape)}, expected {wanted}")
        scale = _setting(config, "alpha_pattern", "lora_alpha", given)
        scale /= math.sqrt(rank) if config.get("use_rslora") else rank
        found |= _cut(names, entry, LowRankPair(a, b, scale), have)
    if not found:
        raise ValueError(f"the adapter has nothing for this model, but {_some(sorted(tensors))}")
    return found


def _cut(names: HubNames, entry: Entry, pair: LowRankPair, have: Mapping[str, LoRALinear]) -> dict[str, LowRankPair]:
    """One adapter of theirs as ours: one for each part of their matrix."""
    ours = [_module(n) for n in entry.ours]
    b = pair.b.t() if _is_transposed(entry) else pair.b
    shapes = [torch.Size([names.shapes[n][0], pair.rank]) for n in entry.ours]
    rows = dict(zip(ours, entry.op.load([b], shapes), strict=True))
    if len(ours) == 1:
        return {ours[0]: LowRankPair(pair.a, rows[ours[0]], pair.scale)}
    shared = {name: LowRankPair(pair.a, rows[name], pair.scale) for name in ours}
    used = {name: part.any(dim=0) for name, part in rows.items()}  # which of the ranks
    chosen = [n for n in ours if n in have] or [n for n in ours if used[n].any()]
    if not chosen or torch.stack([*used.values()]).sum(dim=0).max() > 1:
        return shared
    # No rank serves two parts: blocks, as `_joined` writes them. If some are zero still, the model's own tell more.
    ranks = [have[n].rank for n in chosen if n in have] or [pair.rank // len(chosen)] * len(chosen)
    blocks: dict[str, LowRankPair] = {}
    begin = 0
    for name, rank in zip(chosen, ranks, strict=True):
        some = slice(begin, begin + rank)
        begin += rank
        if used[name].sum() > used[name][some].sum():
            return shared
        blocks[name] = LowRankPair(pair.a[some], rows[name][:, some], pair.scale)
    return blocks


def _read_whole(names: HubNames, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What learned in full, by our parameters' names; taken out of `tensors`."""
    which = names.spellings(t for entry in names.entries for t in entry.theirs)
    given = {their: n for n in tensors if (their := which(n)) is not None}
    found: dict[str, Tensor] = {}
    for entry in names.entries:
        if all(t in given for t in entry.theirs):
            theirs = [tensors.pop(given[t]) for t in entry.theirs]
            shapes = [names.shapes[n] for n in entry.ours]
            if [t.shape for t in theirs] != list(entry.op.shapes(shapes)):
                raise ValueError(f"{entry.theirs[0]} is {list(theirs[0].shape)}, which does not fit the model")
            found |= dict(zip(entry.ours, entry.op.load(theirs, shapes), strict=True))
    return found


def _setting(config: Mapping[str, Any], patterns: str, usual: str, module: str) -> Any:
    """The number of a module: what a pattern says that is its name or the end of it, else the usual."""
    for name, value in (config.get(patterns) or {}).items():
        if module == name or module.endswith("." + name):
            return value
    return config[usual]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
