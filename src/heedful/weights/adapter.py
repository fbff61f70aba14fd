"""LoRA adapters in the format of the `peft` library: adapter_config.json and adapter_model.safetensors.

Tensors have the hub's names, so an adapter trained here runs on the reference model, and one trained there runs here.
Where the hub has one matrix for several of ours (GPT-2's c_attn is our query, key and value), it has one adapter too:

    saving    A stacked, B block-diagonal: [Bq 0 0; 0 Bk 0; 0 0 Bv], its rank the sum of ours (save_adapter.py)
    loading   the same A for each, and B split as the weight is

Loading gives each of ours the whole rank, unless the zeros show that the adapter was saved from here. Parameters that
were trained in full beside the adapter (a new head) are kept under their own names, peft's `modules_to_save`. peft
copies such a module, so that a head that was the embedding is one of its own afterwards.

DoRA (Liu et al. 2024) is read, to be merged: m (W + scale · B A) / |W + scale · B A|, with one m for each output.

peft goes by the names that the reference has in memory. From transformers 5 on ViT's are not those of its files: we
write the files' and read both, so a ViT's adapter goes from peft to us but not back.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import Model
from heedful.models.mapping import Copy, Entry, Fuse, FuseHeads, Transpose
from heedful.nn.lora import LoRALinear, adapted, merge, replace_module
from heedful.weights.folder import (
    HOW_TO_CONVERT,
    PICKLES,
    SkipInit,
    meta_model,
    read_config,
    read_json,
    regular_file,
    special_token_ids,
)
from heedful.weights.load import clone_parameters, with_config
from heedful.weights.safetensors_file import SafetensorsFiles
from heedful.weights.save import config_and_weight_map

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of peft under which an adapter is not W + scale · B A, each with the values that are harmless.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others begin from a W that is not the model's
    **dict.fromkeys(
        ["lora_bias", "use_qalora", "target_parameters", "trainable_token_indices", "layer_replication",
         "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config"],
        (),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class LowRankPair:
    """The factors of an adapter, A (rank, K) and B (N, rank), and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None  # (N,) DoRA's

    @property
    def rank(self) -> int:
        """The inner dimension of B A."""
        return self.a.shape[0]

    @property
    def alpha(self) -> int | float:
        """scale · rank, an integer where it is one but for rounding."""
        alpha = self.scale * self.rank
        return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter: `heedful.load` merges it into the model it was trained on."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """The name or folder of the model that an adapter was trained on; ValueError if that leads back to the adapter."""
    _check_bases(folder)
    return _named_base(folder)


def _named_base(folder: Path) -> str:
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"the adapter in {folder} does not say which model it belongs to")
    return base


def _check_bases(folder: Path) -> None:
    """ValueError if the adapter in a folder is its own base, or is among the bases of its base."""
    seen = [folder.resolve()]
    while is_adapter(seen[-1]):
        path = Path(os.path.expanduser(_named_base(seen[-1]))).resolve()
        if path in seen:
            raise ValueError(
                f"the adapter in {folder} has itself as its base ({' -> '.join(p.name for p in [*seen, path])}): set "
                f"base_model_name_or_path in {seen[-1] / CONFIG} to the model that it was trained on"
            )
        seen.append(path)


def with_adapter(model: Model, folder: Path) -> Model:
    """The model with an adapter merged into its weights, and with the head that the adapter was trained with."""
    if (folder / "config.json").exists():
        entries = model.weight_map().entries(dict(model.named_parameters()))
        config = meta_model(read_config(folder), {name for entry in entries for name in entry.theirs}).config
        model = model if config == model.config else with_config(model, config)[0]
        model.special |= special_token_ids(read_config(folder))  # fine-tuning may teach another end
    model = clone_parameters(untie(model, folder))
    load_adapter(model, folder, to_merge=True)
    return merge(model).eval()


def load_adapter(model: Model, folder: str | Path, *, quantized: bool = False, to_merge: bool = False) -> list[str]:
    """Add the adapter in a folder to a model of the architecture it was trained on; returns the adapted layers' names.

    If the model has adapters on the same layers and of the same ranks, their values are replaced; else new ones are
    added, over 4-bit weights if `quantized`. Afterwards the adapter is trainable and the rest is frozen. With
    `to_merge`, a DoRA adapter scales the frozen weights too; such a model is only for `merge`.
    """
    folder = Path(folder)
    config = read_adapter_config(folder)
    if config.get("use_dora") and not to_merge:
        raise ValueError(f"the adapter in {folder} has use_dora: heedful.load merges it, and it cannot be trained here")
    names, have = HubNames(model), adapted(model)
    tensors = read_adapter_tensors(folder)
    pairs = _read_pairs(names, tensors, config, have)
    whole = _read_whole(names, tensors)
    if config.get("ensure_weight_tying"):  # a tied head is written twice
        tensors = {name: tensor for name, tensor in tensors.items() if not names.weights.is_ignored(name)}
    if tensors:
        raise ValueError(f"the adapter in {folder} has what this model has not: {some_of(sorted(tensors))}")
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
        if pair.magnitude is not None:
            pair = _scaled(layer, pair)
        for parameter, value in ((layer.lora_a, pair.a), (layer.lora_b, pair.b)):
            parameter.data.copy_(value)
            parameter.requires_grad_(True)
    for name, tensor in whole.items():
        learned = model.get_parameter(name)
        learned.data.copy_(tensor)
        learned.requires_grad_(True)
    return list(pairs)


def untie(model: Model, folder: Path) -> Model:
    """The model with a head of its own, if its head is the embedding and the adapter has one of them: peft trains a
    copy. With `ensure_weight_tying` both stay one."""
    settings = read_adapter_config(folder)
    if not getattr(model.config, "tied", False) or settings.get("ensure_weight_tying"):
        return model
    changes = {"tied": False} | ({"scaled": model.config.scales_head} if hasattr(model.config, "scales_head") else {})
    try:
        config = model.config.replace(**changes)
        with torch.device("meta"), SkipInit():
            twin = type(model)(config)
        entries = HubNames(twin).entries
    except ValueError:
        return model
    modules = tuple(module_of(e.theirs[0]) + "." for e in entries if e.ours[0] in ("embed.weight", "head.weight"))
    if not any(name.startswith(modules) for name in read_adapter_tensors(folder)):
        return model
    first = next(model.parameters())
    fresh = with_config(model, config)[0].to(device=first.device, dtype=first.dtype)
    with torch.no_grad():
        fresh.get_parameter("head.weight").copy_(fresh.get_parameter("embed.weight"))
    return fresh


@torch.no_grad()
def _scaled(layer: LoRALinear, pair: LowRankPair) -> LowRankPair:
    """DoRA as LoRA: with m / |W + scale · B A| as a factor of each output, both of the frozen weight and of B."""
    assert layer.weight is not None and pair.magnitude is not None
    whole = layer.weight.to(pair.b.dtype) + pair.scale * (pair.b @ pair.a)  # (N, K)
    factor = (pair.magnitude.to(whole.dtype) / whole.norm(dim=1))[:, None]
    layer.weight.data = (layer.weight * factor).to(layer.weight.dtype)
    return replace(pair, b=pair.b * factor)


class HubNames:
    """Our module names and the hub's, from a copy on the meta device: a model with adapters has other parameters."""

    def __init__(self, model: Model) -> None:
        with torch.device("meta"), SkipInit():
            twin = type(model)(model.config)
        self.weights = config_and_weight_map(twin)[1]
        self.shapes = {n: p.shape for n, p in twin.named_parameters()}
        self.entries = self.weights.entries(self.shapes)
        linear = {n for n, m in twin.named_modules() if isinstance(m, nn.Linear)}
        # The hub's modules that are one linear layer of ours, or several.
        self.modules = {
            module_of(e.theirs[0]): e
            for e in self.entries
            if e.theirs[0].endswith(".weight") and all(module_of(n) in linear for n in e.ours)
        }

    def whole_modules(self, learned: Mapping[str, object]) -> dict[str, list[Entry]]:
        """The hub's modules whose parameters were all trained; ValueError where only some were."""
        found: dict[str, list[Entry]] = {
            module_of(e.theirs[0]): [] for e in self.entries if any(n in learned for n in e.ours)
        }
        for entry in self.entries:
            for module in found:
                if entry.theirs[0].startswith(module + "."):
                    missing = [n for n in entry.ours if n not in learned]
                    if missing:
                        raise ValueError(
                            f"peft's format keeps whole modules: {some_of(missing)} must learn too, "
                            f"as a part of {module}"
                        )
                    found[module].append(entry)
        return found

    def spellings(self, names: Iterable[str]) -> Callable[[str], str | None]:
        """A function from a file's name to the one of `names` it means; files saved without a head lack the prefix."""
        prefix = self.weights.prefix
        known = {n: n for n in names}
        for name in list(known):
            known.setdefault(name.removeprefix(prefix), name)
            known.setdefault(prefix + name, name)
        return lambda name: known.get(self.weights.canonical_name(name))


def check_linear(entry: Entry) -> None:
    """ValueError unless the entry is one linear layer in the hub's layout too."""
    if not isinstance(entry.op, Copy | Transpose | Fuse | FuseHeads):
        raise ValueError(
            f"{module_of(entry.ours[0])} is no linear layer in the hub's layout ({entry.theirs[0]}): do not adapt it"
        )


def is_transposed(entry: Entry) -> bool:
    """Whether the hub stores the weight as (inputs, outputs), as GPT-2 does."""
    op = entry.op.inner if isinstance(entry.op, Fuse) else entry.op
    return isinstance(op, Transpose)


def module_of(name: str) -> str:
    """The module of a parameter's name: "h.0.attn.weight" -> "h.0.attn"."""
    return name.rpartition(".")[0]


def some_of(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# --- files -----------------------------------------------------------------------------------------------------------


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; ValueError for other methods than LoRA and for variants that are not supported."""
    if not (folder / TENSORS).exists():
        pickles = [p.name for p in folder.glob("adapter_model.*") if p.suffix in PICKLES]
        if pickles:
            raise ValueError(f"{folder} has no {TENSORS}, only {', '.join(pickles)}. {HOW_TO_CONVERT.format(folder)}")
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


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by the names that the hub has for a model's modules."""
    with SafetensorsFiles([regular_file(folder, TENSORS)]) as source:
        return {n.removeprefix(PREFIX): source.get(n).clone() for n in source.names()}


def _read_pairs(
    names: HubNames, tensors: dict[str, Tensor], config: Mapping[str, Any], have: Mapping[str, LoRALinear]
) -> dict[str, LowRankPair]:
    """The adapters by our layers' names; removes their tensors from `tensors`."""
    which = names.spellings(f"{their}.weight" for their in names.modules)
    found: dict[str, LowRankPair] = {}
    for name in [n for n in tensors if n.endswith(".lora_A.weight")]:
        given = name.removesuffix(".lora_A.weight")
        their = which(f"{given}.weight")
        if their is None or f"{given}.lora_B.weight" not in tensors:
            continue  # reported with what else is left
        a, b = tensors.pop(name), tensors.pop(f"{given}.lora_B.weight")
        entry = names.modules[module_of(their)]
        check_linear(entry)
        rank = _setting(config, "rank_pattern", "r", given)
        outputs = sum(names.shapes[n][0] for n in entry.ours)
        wanted = ((rank, names.shapes[entry.ours[0]][1]), (outputs, rank))
        if (tuple(a.shape), tuple(b.shape)) != wanted:
            raise ValueError(f"{given}: A {list(a.shape)} and B {list(b.shape)}, expected {wanted}")
        scale = _setting(config, "alpha_pattern", "lora_alpha", given)
        scale /= math.sqrt(rank) if config.get("use_rslora") else rank
        magnitude = _pop_magnitude(tensors, given, outputs) if config.get("use_dora") else None
        found |= _cut(names, entry, LowRankPair(a, b, scale, magnitude), have)
    if not found:
        raise ValueError(f"the adapter has nothing for this model, but {some_of(sorted(tensors))}")
    return found


def _pop_magnitude(tensors: dict[str, Tensor], module: str, outputs: int) -> Tensor:
    """DoRA's magnitudes of a module; removes them from `tensors`."""
    name = f"{module}.lora_magnitude_vector"
    magnitude = tensors.pop(name if name in tensors else f"{name}.weight", None)
    if magnitude is None or magnitude.numel() != outputs:
        raise ValueError(f"{module}: use_dora needs a lora_magnitude_vector of {outputs} numbers")
    return magnitude.flatten()


def _cut(names: HubNames, entry: Entry, pair: LowRankPair, have: Mapping[str, LoRALinear]) -> dict[str, LowRankPair]:
    """Split one adapter of the hub's matrix into one for each layer of ours."""
    ours = [module_of(n) for n in entry.ours]
    b = pair.b.t() if is_transposed(entry) else pair.b
    shapes = [torch.Size([names.shapes[n][0], pair.rank]) for n in entry.ours]
    rows = dict(zip(ours, entry.op.load([b], shapes), strict=True))
    shared = {name: replace(pair, b=rows[name]) for name in ours}
    if pair.magnitude is not None:
        column = pair.magnitude[:, None]  # (N, 1)
        parts = entry.op.load([column.t() if is_transposed(entry) else column], [torch.Size([s[0], 1]) for s in shapes])
        shared = {n: replace(shared[n], magnitude=part.flatten()) for n, part in zip(ours, parts, strict=True)}
    if len(ours) == 1 or pair.magnitude is not None:
        return shared
    used = {name: part.any(dim=0) for name, part in rows.items()}  # which of the ranks
    chosen = [n for n in ours if n in have] or [n for n in ours if used[n].any()]
    if not chosen or torch.stack([*used.values()]).sum(dim=0).max() > 1:
        return shared
    # No rank is used by two parts: block-diagonal, as it is saved from here. A block may be zero: then ranks of `have`.
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
    """The parameters trained in full, by our names; removes them from `tensors`."""
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
    """A module's rank or alpha: of the pattern that matches the end of its name, else the default."""
    for name, value in (config.get(patterns) or {}).items():
        if module == name or module.endswith("." + name):
            return value
    return config[usual]
