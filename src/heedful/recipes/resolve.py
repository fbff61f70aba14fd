"""From what a user names, a recipe, a data file, a model to fine-tune, to a validated recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.data.chats import is_chat_file
from heedful.models.config import did_you_mean
from heedful.recipes.data_paths import change_recipe
from heedful.train.recipe import Recipe, merge_tables, read_recipe, shipped_recipes

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
        if is_chat_file(path) and not {"kind", "text"} & changes.get("data", {}).keys():
            automatic = CHAT
            if init_from is None and "init_from" not in changes.get("model", {}):
                raise ValueError(f"conversations teach a model that is trained already: heedful train MODEL {text}")
            if "steps" in changes.get("train", {}):
                automatic = merge_tables(CHAT, {"train": {"epochs": 0}})
        name, given = path.name.partition(".")[0] or "run", merge_tables(automatic, {"data": {"source": str(path)}})
    else:
        hint = did_you_mean(text, shipped_recipes())
        known = ", ".join(shipped_recipes())
        raise ValueError(f"there is no file, folder or recipe {text!r}{hint}; recipes that ship: {known}")
    given, notes = change_recipe(given, changes, shipped=shipped)
    if init_from is not None:
        given["model"] = {**changes.get("model", {}), "init_from": init_from}
    return ResolvedRecipe(name, Recipe.from_dict(given), notes)
