"""Models on the meta device: shapes without memory, from a folder's or file's config and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from heedful.models.base import Model
from heedful.weights.adapter import base_of, is_adapter
from heedful.weights.folder import meta_model, read_config, read_json, tensor_source, weight_files
from heedful.weights.gguf import config_from_gguf
from heedful.weights.gguf_file import GgufFile
from heedful.weights.resolve import reject_pickle, resolve_model
from heedful.weights.safetensors_file import SafetensorsFiles


def load_meta(path: Path) -> Model:
    """The model of a GGUF file or of a folder (an adapter's, or with a single GGUF file), on the meta device."""
    reject_pickle(path)
    if path.is_dir() and not (path / "config.json").exists():
        if is_adapter(path):  # of the model it was trained on
            return load_meta(resolve_model(base_of(path)))
        if len(files := sorted(path.glob("*.gguf"))) == 1:
            return load_meta(files[0])
    if path.is_dir():
        hub = read_config(path)
        model = meta_model(hub, _tensor_names(path, hub))
        model.preprocessor = read_json(path, "preprocessor_config.json", missing={})
        return model
    with GgufFile(path) as file:
        return meta_model(config_from_gguf(file))


def _tensor_names(folder: Path, hub: Mapping[str, Any]) -> Collection[str] | None:
    """The names in a folder's weights; None where there are none that can be read."""
    try:
        with SafetensorsFiles(weight_files(folder)) as files:
            return set(tensor_source(files, hub).names())
    except (OSError, ValueError):
        return None
