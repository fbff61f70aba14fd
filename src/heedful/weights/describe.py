"""What a model is, in words and numbers: `heedful info`. A published size is described without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.models.registry import FAMILIES, size, sizes

if TYPE_CHECKING:
    from heedful.text import Tokenizer

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


def describe(name: str) -> str:
    """Several lines: what it is, its architecture, parameters, memory by number type, context."""
    from heedful.zoo import cards

    if name in sizes() and name not in cards() and not Path(name).exists():
        chosen = size(name)
        return _page(
            name,
            chosen.family,
            chosen.settings,
            chosen.parameters,
            "none here; heedful.create makes new ones",
        )
    return _describe_file(name)


def _describe_file(name: str) -> str:
    from heedful.weights.folder import meta_model, read_config
    from heedful.weights.gguf import hub_config_from_gguf
    from heedful.weights.gguf_file import GgufFile
    from heedful.weights.resolve import reject_pickle, resolve

    path = resolve(name)
    reject_pickle(path)
    if path.is_dir():
        model = meta_model(read_config(path))
    else:
        with GgufFile(path) as file:
            model = meta_model(hub_config_from_gguf(file))
    return _page(name, model.family, model.config.to_dict(), model.n_parameters(), str(path))


def _page(name: str, family: str, settings: Mapping[str, Any], parameters: int, where: str) -> str:
    lines = [
        ("", f"{name}: {FAMILIES[family].about}"),
        ("family", f"{family} (src: heedful/models/{family}.py)"),
        ("weights", where),
        ("parameters", f"{parameters:,}"),
        (
            "memory",
            ", ".join(f"{kind} {size_in_words(parameters * b)}" for kind, b in BYTES.items()) + " (weights alone)",
        ),
    ]
    if settings.get("max_len"):
        lines.append(("context", f"{settings['max_len']:,} positions"))
    lines += [(key, str(value)) for key, value in settings.items() if value is not None and key != "max_len"]
    return "\n".join(f"{key:<14}{value}" if key else value for key, value in lines)


def size_in_words(n_bytes: float) -> str:
    """497759232 -> 498 MB"""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {name}"
    return f"{n_bytes:.0f} bytes"


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a model or of a folder that has nothing else; the weights are not read."""
    from heedful.text import Tokenizer
    from heedful.weights.resolve import resolve

    path = resolve(name)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    from heedful.weights.gguf_file import GgufFile

    with GgufFile(path) as file:
        return Tokenizer.from_gguf(file.fields)
