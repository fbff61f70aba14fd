"""A model on this machine as shapes alone: what its files say it is, without reading its weights."""

from __future__ import annotations

from pathlib import Path

from heedful.models.base import Model
from heedful.weights.adapted import base_of, is_adapter
from heedful.weights.folder import meta_model, read_config
from heedful.weights.gguf import hub_config_from_gguf
from heedful.weights.gguf_file import GgufFile
from heedful.weights.resolve import reject_pickle, resolve


def load_meta(path: Path) -> Model:
    """The model at a folder, an adapter's or one with a single GGUF file too, or at a GGUF file."""
    reject_pickle(path)
    if path.is_dir() and not (path / "config.json").exists():
        if is_adapter(path):  # with the head of the model it belongs to
            return load_meta(resolve(base_of(path)))
        if len(files := sorted(path.glob("*.gguf"))) == 1:
            return load_meta(files[0])
    if path.is_dir():
        return meta_model(read_config(path))
    with GgufFile(path) as file:
        return meta_model(hub_config_from_gguf(file))
