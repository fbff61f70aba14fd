"""Describe a model: architecture, parameters, memory, context. A published size needs no PyTorch for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.models.registry import FAMILIES, size, sizes
from heedful.text.plural import counted

if TYPE_CHECKING:
    from heedful.models.base import Model
    from heedful.text import Tokenizer

BYTES_PER_PARAMETER = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


def describe_model(name: str) -> str:
    """Lines of text on a model or a published size: family, weights, parameters, memory per dtype, config."""
    from heedful.zoo import cards

    if name in sizes() and name not in cards() and not Path(name).exists():
        chosen = size(name)
        where = "none here; heedful.create makes new ones"
        return _format_description(name, chosen.family, chosen.settings, chosen.parameters, where)
    return _describe_file(name)


def _describe_file(name: str) -> str:
    from heedful.weights.meta import load_meta
    from heedful.weights.resolve import resolve_model

    path = resolve_model(name)
    model = load_meta(path)
    settings = model.config.to_dict() | {"max_len": model.context_length}
    described = _format_description(name, model.family, settings, model.n_parameters(), str(path))
    return "\n".join([described, *cache_lines(model), *card_lines(path)])


def cache_lines(model: Model) -> list[str]:
    """The size of the KV cache of a model that generates, per token, in float32 and in 8 bits."""
    size, small = model.kv_bytes_per_token(), model.kv_bytes_per_token("int8")
    if not size:
        return []
    return [f"{'KV cache':<14}{format_bytes(size)} per token, int8 {format_bytes(small)} (--kv-cache)"]


def card_lines(path: Path) -> list[str]:
    """What the card of a model that ships says: scores with their commands, data, licence, good at, fails at."""
    from heedful.zoo import FOLDER, read_card

    if path.parent != FOLDER:
        return []
    card = read_card(path)
    told = ("data", "kept apart", "training", "recipe", "licence", "good at", "fails at")
    lines = [f"{key:<14}{card.facts[key]}" for key in told if key in card.facts]
    scores = [f"{'score':<14}{score} ({score.data}): {score.command}" for score in card.scores]
    return [f"{'about':<14}{card.about}", *scores, *lines, f"{'card':<14}{path / 'README.md'}"]


def _format_description(name: str, family: str, settings: Mapping[str, Any], parameters: int, where: str) -> str:
    memory = ", ".join(f"{dtype} {format_bytes(parameters * n)}" for dtype, n in BYTES_PER_PARAMETER.items())
    lines = [
        ("", f"{name}: {FAMILIES[family].about}"),
        ("family", f"{family} (src: heedful/models/{family}.py)"),
        ("weights", where),
        ("parameters", f"{parameters:,}"),
        ("memory", f"{memory} (weights alone)"),
    ]
    if settings.get("max_len"):
        lines.append(("context", counted(settings["max_len"], "position")))
    told = ("max_len", "context_length")
    lines += [(key, str(value)) for key, value in settings.items() if value is not None and key not in told]
    width = max(14, *(len(key) + 2 for key, _ in lines))
    return "\n".join(f"{key:<{width}}{value}" if key else value for key, value in lines)


def format_bytes(n_bytes: float) -> str:
    """497759232 -> 498 MB"""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {name}"
    return f"{n_bytes:.0f} bytes"


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model, or of a folder with a tokenizer alone; weights are not read."""
    from heedful.text import Tokenizer
    from heedful.weights.resolve import resolve_model

    path = resolve_model(name)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    from heedful.weights.gguf_file import GgufFile

    with GgufFile(path) as file:
        return Tokenizer.from_gguf(file.fields)
