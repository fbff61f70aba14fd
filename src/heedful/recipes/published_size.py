"""A recipe for the name of a published size, to estimate what training it would cost: `heedful estimate gpt2`.

It has the objective that the family was trained with and no data: their amount is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heedful.models.registry import FAMILIES, size, sizes
from heedful.recipes.data_paths import change_recipe
from heedful.recipes.resolve import ResolvedRecipe
from heedful.text.plural import counted
from heedful.train.recipe import Recipe, merge_tables, shipped_recipes

LONGEST = 1024  # tokens of an example
ENCODER: dict[str, Any] = {"data": {"length": 128}, "objective": {"name": "masked"}}
BY_FAMILY: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "distilbert": ENCODER,
    "t5": {"data": {"length": 512}, "objective": {"name": "spans"}},
    "transformer": {"data": {"kind": "pairs", "length": 64}, "objective": {"name": "seq2seq"}},
    "vit": {"data": {"kind": "images"}, "objective": {"name": "classify"}},
}
TRAINING: dict[str, Any] = {
    "train": {"steps": 1000, "batch_size": 8},
    "optimizer": {"name": "adamw", "lr": 3e-4},
}


def is_size(name: str) -> bool:
    """Whether this is the name of a published size, and of no recipe."""
    return name in sizes() and name not in shipped_recipes()


def size_recipe(name: str, changes: Mapping[str, Any]) -> ResolvedRecipe:
    """The recipe of a published size, with `changes`."""
    family = size(name).family
    settings = BY_FAMILY.get(family)
    if settings is None:
        config = FAMILIES[family].load().config_class.from_dict(dict(size(name).settings))
        context: int = getattr(config, "max_len", None) or LONGEST
        settings = {"data": {"length": min(context, LONGEST)}, "objective": {"name": "causal"}}
    table = merge_tables(merge_tables(TRAINING, settings), {"model": {"size": name}})
    table, notes = change_recipe(table, changes)
    recipe = Recipe.from_dict(table)
    example = "images" if recipe.data.kind == "images" else f"examples of {recipe.data.length:,} tokens"
    note = (
        f"training {name} from its first weights: {counted(recipe.train.steps, 'step')} of {recipe.train.batch_size} "
        f"{example}; change them by --set, as --set train.batch_size=32"
    )
    return ResolvedRecipe(name, recipe, [note, *notes])
