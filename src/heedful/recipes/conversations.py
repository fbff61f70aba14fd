"""The datasets of a recipe that are conversations: chats to imitate."""

from __future__ import annotations

from typing import Any

import numpy as np

from heedful.data.chats import Chats, read_chats
from heedful.data.corpus import uniform_cross_entropy
from heedful.recipes.data_paths import resolve_data_path, single_source_path
from heedful.recipes.recipe_data import RecipeData
from heedful.text import Tokenizer
from heedful.train.recipe import Recipe

LEAST_TO_SPLIT = 10  # conversations of which a share is held out


def read_conversations(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    """Chats, of which the answers are learned."""
    data, columns = recipe.data, {"prompt": recipe.data.text, "answer": recipe.data.target}
    every, held = read_chats(single_source_path(data), tokenizer, **columns), list[Any]()
    if data.validation:
        held = read_chats(resolve_data_path(data.validation, "validation"), tokenizer, **columns)
    elif data.share and len(every) >= LEAST_TO_SPLIT:
        order = np.random.default_rng(0).permutation(len(every))
        n = max(1, round(data.share * len(every)))
        every, held = [every[i] for i in order[n:]], [every[i] for i in order[:n]]
    train = Chats(every, data.length)
    n_tokens = len(train.ids.values)
    notes = [
        *train.notes,
        f"{len(every):,} conversations of {n_tokens:,} tokens, {train.n_learned:,} of them the assistant's, in "
        f"{len(train):,} rows",
    ]
    baselines = {} if recipe.objective.name == "distill" else {"uniform": uniform_cross_entropy(len(tokenizer))}
    validation = Chats(held, data.length) if held else None
    settings = {"vocab_size": len(tokenizer)}
    return RecipeData(train, validation, n_tokens, settings, baselines=baselines, notes=notes)
