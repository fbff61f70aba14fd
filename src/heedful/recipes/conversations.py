"""The datasets of a recipe that are conversations: chats to imitate, pairs of answers of which one is preferred, and
prompts whose completions are rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from heedful.data.chats import Chats, read_chats
from heedful.data.corpus import uniform_cross_entropy
from heedful.data.preferences import Preferences, read_preferences
from heedful.data.prompts import Prompts, read_prompts
from heedful.data.ragged import Subset
from heedful.data.rewards import check_reward_answer
from heedful.recipes.data_paths import resolve_data_path, single_source_path
from heedful.recipes.recipe_data import RecipeData
from heedful.text import Tokenizer
from heedful.text.plural import counted
from heedful.train.recipe import Recipe

LEAST_TO_SPLIT = 10  # conversations of which a share is held out


def _split(recipe: Recipe, every: Sequence[Any], held: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What is trained on, and what is held out: that of a file of its own, or a share."""
    if recipe.data.validation or not recipe.data.share or len(every) < LEAST_TO_SPLIT:
        return list(every), list(held)
    order = np.random.default_rng(0).permutation(len(every))
    n = max(1, round(recipe.data.share * len(every)))
    return [every[i] for i in order[n:]], [every[i] for i in order[:n]]


def read_conversations(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    """Chats, of which the answers are learned."""
    data = recipe.data
    read = partial(read_chats, tokenizer=tokenizer, prompt=data.text, answer=data.target)
    every = read(single_source_path(data))
    held = read(resolve_data_path(data.validation, "validation")) if data.validation else []
    every, held = _split(recipe, every, held)
    train = Chats(every, data.length)
    n_tokens = len(train.ids.values)
    notes = [
        *train.notes,
        f"{counted(len(every), 'conversation')} of {counted(n_tokens, 'token')}, {train.n_learned:,} of them the "
        "assistant's, in "
        f"{counted(len(train), 'row')}",
    ]
    baselines = {} if recipe.objective.name == "distill" else {"uniform": uniform_cross_entropy(len(tokenizer))}
    validation = Chats(held, data.length) if held else None
    settings = {"vocab_size": len(tokenizer)}
    return RecipeData(train, validation, n_tokens, settings, baselines=baselines, notes=notes)


def read_pairs_of_answers(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    """Chosen and rejected answers."""
    data = recipe.data
    read = partial(read_preferences, tokenizer=tokenizer, prompt=data.text)
    every = read(single_source_path(data))
    held = read(resolve_data_path(data.validation, "validation")) if data.validation else []
    every, held = _split(recipe, every, held)
    train = Preferences(every, data.length)
    validation = Preferences(held, data.length) if held else None
    baselines = {"reference": float(np.log(2))} if recipe.objective.loss_type in ("usual", "sigmoid") else {}
    n_tokens = len(train.ids.values)
    settings = {"vocab_size": len(tokenizer)}
    return RecipeData(train, validation, n_tokens, settings, baselines=baselines, notes=train.notes)


def read_rewarded_prompts(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    """Prompts with their answers, all in one dataset of which training and validation data are parts: the number of a
    prompt in a batch says which answer is its own."""
    data = recipe.data
    read = partial(read_prompts, tokenizer=tokenizer, prompt=data.text, answer=data.target)
    prompts, answers = read(single_source_path(data))
    train, held = _split(recipe, range(len(prompts)), [])
    if data.validation:
        more = read(resolve_data_path(data.validation, "validation"))
        held = list(range(len(prompts), len(prompts) + len(more[0])))
        prompts, answers = [*prompts, *more[0]], [*answers, *more[1]]
    for answer in set(answers):
        check_reward_answer(recipe.objective.reward, answer)
    long = max(map(len, prompts))
    if long > data.length:
        raise ValueError(f"a prompt has {long} tokens, and data.length is {data.length}: set it higher, or shorten it")
    every = Prompts(prompts, answers)
    validation = Subset(every, np.array(held)) if held else None
    made = Subset(every, np.array(train))
    return RecipeData(made, validation, len(every.ids.values), {"vocab_size": len(tokenizer)}, answers=answers)
