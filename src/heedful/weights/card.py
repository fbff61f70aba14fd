"""The card of a saved model: a README.md with the hub's metadata, that says what the model is and how to load it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from heedful.models.base import DecoderModel, Model
from heedful.models.registry import FAMILIES
from heedful.text.tokenizer import Tokenizer
from heedful.weights.hub import is_id
from heedful.zoo import split_card

# Of the card in the folder that a model was loaded from; its scores are those of that model's file, and stay there.
KEPT = ("license", "license_name", "license_link", "language", "datasets", "base_model", "pipeline_tag")
MAX_CARD = 2**20
# What the hub calls a model that has an ability, the most telling one first.
TASKS: Mapping[str, str] = {
    "translate": "translation",
    "complete_image": "unconditional-image-generation",
    "generate": "text-generation",
    "answer": "question-answering",
    "tag": "token-classification",
    "classify": "text-classification",
    "fill": "fill-mask",
    "embed": "feature-extraction",
}


def model_card(
    model: Model,
    tokenizer: Tokenizer | None,
    config: Mapping[str, Any],
    *,
    name: str,
    source: Path | None = None,
    own_layout: str | None = None,
) -> str:
    """The text of a README.md. `config` is config.json, `source` the folder that the model was loaded from, and
    `own_layout` says why transformers does not read this one."""
    metadata = _metadata(model, config, name, source, own_layout)
    licence = metadata.get("license_name") or metadata.get("license")
    context = model.context_length
    rows = {
        "architecture": FAMILIES[model.family].about,
        "parameters": f"{model.n_parameters():,}",
        "context": "no limit" if context is None else f"{context:,} " + ("tokens" if tokenizer else "positions"),
        "from": _origin(name, source),
        "licence": licence or "not known: ask where the model is from",
        "read by": "heedful" if own_layout else "heedful, transformers",
    }
    table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    return (
        f"---\n{_yaml(metadata)}---\n# {name}\n\n| | |\n|---|---|\n{table}\n"
        f"## How to load it\n{_how_to_load(model, tokenizer, config, own_layout)}"
    )


def _metadata(
    model: Model, config: Mapping[str, Any], name: str, source: Path | None, own_layout: str | None
) -> dict[str, Any]:
    known = _front_matter(source)
    found: dict[str, Any] = {"library_name": "heedful" if own_layout else "transformers"}
    found |= {key: known[key] for key in KEPT if known.get(key)}
    if is_id(name):
        found["base_model"] = name
    if "pipeline_tag" not in found and (task := _task(model)) is not None:
        found["pipeline_tag"] = task
    found["tags"] = list(dict.fromkeys(["heedful", model.family, str(config["model_type"])]))
    return found


def _task(model: Model) -> str | None:
    task = next((task for ability, task in TASKS.items() if ability in model.abilities), None)
    if task == "text-classification" and model.config.hub is not None and "image_size" in model.config.to_dict():
        return "image-classification"
    return task


def _origin(name: str, source: Path | None) -> str:
    if is_id(name):
        return f"[{name}](https://huggingface.co/{name})"
    return f"`{name}`" if source is not None else "a model made with heedful"


def _front_matter(source: Path | None) -> dict[str, Any]:
    """The metadata of the card in a folder; empty if it has none that can be read."""
    path = None if source is None else source / "README.md"
    if path is None or not path.is_file() or path.stat().st_size > MAX_CARD:
        return {}
    import yaml  # type: ignore[import-untyped]  # which huggingface_hub depends on

    try:
        found = yaml.safe_load(split_card(path)[0])
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(metadata: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120))


def _how_to_load(model: Model, tokenizer: Tokenizer | None, config: Mapping[str, Any], own_layout: str | None) -> str:
    ours = _python(["import heedful", 'model = heedful.load("FOLDER")', *_example(model, tokenizer)])
    if own_layout:
        return f"{ours}\nIt is in heedful's own layout, which transformers does not read: {own_layout}.\n"
    kind = config.get("architectures", ["AutoModel"])[0]
    others = ["AutoTokenizer"] if tokenizer is not None else ["AutoImageProcessor"] if _is_vision(model) else []
    lines = [f"from transformers import {', '.join([*others, kind])}", f'model = {kind}.from_pretrained("FOLDER")']
    lines += [f'{_variable(other)} = {other}.from_pretrained("FOLDER")' for other in others]
    quantized = (
        "With transformers it needs the package compressed-tensors.\n" if "quantization_config" in config else ""
    )
    return ours + _python(lines) + quantized


def _is_vision(model: Model) -> bool:
    return "image_size" in model.config.to_dict()


def _variable(auto_class: str) -> str:
    return "tokenizer" if auto_class == "AutoTokenizer" else "processor"


def _example(model: Model, tokenizer: Tokenizer | None) -> list[str]:
    """A line that uses the model."""
    if tokenizer is None or "generate" not in model.abilities:
        return []
    if not isinstance(model, DecoderModel):
        return ['print(model.generate("..."))']
    chats = tokenizer.chat_template is not None
    return ['print(model.generate("Hello", chat=True))' if chats else 'print(model.generate("Once upon a time"))']


def _python(lines: Iterable[str]) -> str:
    return "```python\n" + "".join(f"{line}\n" for line in lines) + "```\n"
