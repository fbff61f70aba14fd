"""Recipes (TOML files), and from a recipe to a run: build, inputs, dry run, estimate, launch.

from heedful.recipes import train, resume
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.recipes.launch import resume, train

__all__ = ["resume", "train"]


def __getattr__(name: str) -> object:
    if name in __all__:  # imported when first used: they need torch
        return getattr(import_module("heedful.recipes.launch"), name)
    raise AttributeError(f"heedful.recipes has no {name!r}; it has {', '.join(__all__)}")
