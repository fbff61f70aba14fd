"""A model on this machine as shapes alone: what its files say it is, without reading its weights."""

from __future__ import annotations

from pathlib import Path

from heedful.models.base import Model
from heedful.weights.adapted import base_of, is_adapter
from heedful.weights.find import find, refuse_pickle
from heedful.weights.folder import build, read_config
from heedful.weights.gguf import as_hub_config
from heedful.weights.gguf_file import GgufFile


def blank(path: Path) -> Model:
    """The model at a folder, an adapter's or one with a single GGUF file too, or at a GGUF file."""
    refuse_pickle(path)
    if path.is_dir() and not (path / "config.json").exists():
        if is_adapter(path):  # with the head of the model it belongs to
            return blank(find(base_of(path)))
        if len(files := sorted(path.glob("*.gguf"))) == 1:
            return blank(files[0])
    if path.is_dir():
        return build(read_config(path))
    with GgufFile(path) as file:
        return build(as_hub_config(file))
