"""From what a user names, a recipe, a data file, a model to fine-tune, to a validated recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.data.chats import is_chat_file
from heedful.data.images import common_size, is_image_data
from heedful.data.preferences import is_preference_file
from heedful.models.config import did_you_mean
from heedful.recipes.data_paths import change_recipe
from heedful.train.recipe import Recipe, merge_tables, read_recipe, shipped_recipes
from heedful.weights.meta import load_meta
from heedful.weights.resolve import resolve_model

# Settings of `heedful train my.txt`: tuned on 1 MB of text, good for more.
AUTOMATIC: dict[str, Any] = {
    "data": {"length": 128},
    "train": {"steps": 1000, "batch_size": 16},
    "optimizer": {"name": "muon", "lr": 0.01, "muon_lr": 0.025, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "schedule": {"name": "cosine", "warmup": 50, "final": 0.05},
}
# The same for fine-tuning: a low learning rate, or the model forgets.
FINE_TUNING: dict[str, Any] = {
    "data": {"length": 128},
    "train": {"steps": 300, "batch_size": 8},
    "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.0},
    "schedule": {"name": "linear", "warmup": 20, "final": 0.0},
}

# Of chats: adapters alone (LoRA), a few passes over packed rows.
CHAT: dict[str, Any] = {
    "data": {"kind": "chat", "length": 512},
    "train": {"epochs": 3, "batch_size": 4},
    "adapter": {"kind": "lora", "rank": 16, "alpha": 32},
    "optimizer": {"name": "adamw", "lr": 5e-4, "weight_decay": 0.0},
    "schedule": {"name": "linear", "warmup": 10, "final": 0.0},
}

# Of pairs of answers: adapters too, one pass, and how it was before.
PREFERENCES: dict[str, Any] = merge_tables(
    CHAT,
    {
        "data": {"kind": "preferences"},
        "objective": {"name": "dpo"},
        "train": {"epochs": 1, "batch_size": 8, "eval_first": True},
        "optimizer": {"lr": 1e-4},
    },
)
# Of prompts whose completions are rewarded (data.kind prompts).
REWARDED: dict[str, Any] = merge_tables(
    CHAT,
    {
        "data": {"kind": "prompts", "length": 256},
        "objective": {"name": "grpo"},
        "train": {"epochs": 1, "batch_size": 8, "eval_first": True},
        "optimizer": {"lr": 1e-4},
    },
)

# Of images with labels: a small ViT. Photographs may be mirrored too (data.flip), digits and letters may not.
IMAGES: dict[str, Any] = {
    "model": {"family": "vit", "d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 512, "dropout": 0.1},
    "data": {"kind": "images", "augment": 1, "strength": 0.5},
    "objective": {"name": "classify", "smoothing": 0.1},
    "train": {"steps": 1000, "batch_size": 32},
    "optimizer": {"name": "muon", "lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1},
    "schedule": {"warmup": 50, "final": 0.0},
}
USUAL_SIZE = 64  # that the images of a folder are resized to if they differ, or are large


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe, a name for its run, and what was chosen for the user."""

    name: str
    recipe: Recipe
    notes: list[str] = field(default_factory=list)


def resolve_recipe(
    what: str | Path, changes: Mapping[str, Any] | None = None, *, init_from: str | None = None
) -> ResolvedRecipe:
    """The recipe of a shipped name, a .toml file, or a path to data, with `changes`; `init_from` is a model to
    fine-tune."""
    text, path, changes = str(what), Path(os.path.expanduser(what)), changes or {}
    shipped = text in shipped_recipes()
    if shipped:
        name, given = text, read_recipe(shipped_recipes()[text])
    elif path.suffix == ".toml" and path.is_file():
        name, given = path.stem, read_recipe(path)
    elif path.exists():
        automatic = AUTOMATIC if init_from is None else FINE_TUNING
        talk = _conversation_settings(path, changes)
        if talk is not None:
            automatic = talk
            if init_from is None and "init_from" not in changes.get("model", {}):
                raise ValueError(f"conversations teach a model that is trained already: heedful train MODEL {text}")
            if "steps" in changes.get("train", {}):
                automatic = merge_tables(talk, {"train": {"epochs": 0}})
        elif is_image_data(path) and "kind" not in changes.get("data", {}):
            automatic = _image_settings(path, init_from)
        name, given = path.name.partition(".")[0] or "run", merge_tables(automatic, {"data": {"source": str(path)}})
    else:
        hint = did_you_mean(text, shipped_recipes())
        known = ", ".join(shipped_recipes())
        raise ValueError(f"there is no file, folder or recipe {text!r}{hint}; recipes that ship: {known}")
    given, notes = change_recipe(given, changes, shipped=shipped)
    if init_from is not None:
        given["model"] = {**changes.get("model", {}), "init_from": init_from}
    return ResolvedRecipe(name, Recipe.from_dict(given), notes)


def _conversation_settings(path: Path, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings for conversations, by what the file has, or by data.kind; None for other data."""
    changed = changes.get("data", {})
    if changed.get("kind") == "prompts":
        return REWARDED
    if changed.get("kind", "preferences") == "preferences" and is_preference_file(path):
        return PREFERENCES
    return CHAT if is_chat_file(path) and not {"kind", "text"} & changed.keys() else None


def _image_settings(path: Path, init_from: str | None) -> dict[str, Any]:
    """The settings for images with labels. Those of a folder are resized if they differ in size or are large, or to the
    size of the model to fine-tune."""
    size = 0
    if path.is_dir():
        common = common_size(path)
        size = 0 if common is not None and common <= USUAL_SIZE else USUAL_SIZE
    if init_from is None:
        return merge_tables(IMAGES, {"data": {"image_size": size}})
    size = getattr(load_meta(resolve_model(init_from)).config, "image_size", size)
    if isinstance(size, tuple):
        raise ValueError(f"{init_from} reads images of {size[0]} x {size[1]}: only models of squares are fine-tuned")
    data = {**IMAGES["data"], "image_size": size}
    return {**FINE_TUNING, "data": data, "objective": IMAGES["objective"]}
