"""Recipes (TOML files), and from a recipe to a run: build, inputs, dry run, estimate, launch."""

from heedful.recipes.launch import train

__all__ = ["train"]
