"""A folder that holds an adapter alone is a model too: the one it was made for, with the adapter merged into it."""

from __future__ import annotations

from pathlib import Path

from heedful.models.base import Model
from heedful.nn.lora import merge
from heedful.weights.adapter import CONFIG, load_adapter, read_adapter_config
from heedful.weights.folder import meta_model, read_config
from heedful.weights.load import clone_parameters, with_config


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """The name or folder of the model that an adapter was made for."""
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"the adapter in {folder} does not say which model it belongs to")
    return base


def with_adapter(model: Model, folder: Path) -> Model:
    """The model with the adapter merged into its weights; with the head that the adapter was trained with."""
    if (folder / "config.json").exists():
        config = meta_model(read_config(folder)).config
        model = model if config == model.config else with_config(model, config)[0]
    load_adapter(clone_parameters(model), folder)
    return merge(model).eval()
