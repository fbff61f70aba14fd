"""Dry run of a recipe: its model on the "meta" device, and random examples with the shapes of its data.

Nothing is downloaded or tokenized; what cannot be known without that is assumed, and reported in `notes`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful.data.dataset import IGNORED, Dataset, Draw
from heedful.data.images import ImageSet, LabelledImages
from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel, Model
from heedful.models.heads import PretrainingHead
from heedful.recipes.build import (
    choose_model,
    count_steps,
    needs_reference,
    new_model,
    pretrained_config,
    recipe_objective,
)
from heedful.recipes.data_paths import source_paths
from heedful.recipes.inputs import RecipeData, load_data
from heedful.recipes.vocabulary import choose_vocabulary, make_tokenizer
from heedful.text import byte_tokens
from heedful.train.adapters import adapt
from heedful.train.distill import halve
from heedful.train.memory_tracker import logits_width
from heedful.train.objectives import Objective
from heedful.train.recipe import Recipe
from heedful.weights import hub
from heedful.weights.meta import load_meta
from heedful.weights.resolve import resolve_model, shipped_models

LARGE = 64 * 10**6  # bytes above which the vocabulary is chosen by the size of a text alone
BYTES_PER_TOKEN = {"characters": 1.0, "bytes": 1.0}
DEFAULT_BYTES_PER_TOKEN = 4.0
DEFAULT_VOCAB_SIZE = 8192
DISTILLED = {"labelled": "classify", "tagged": "tag", "answers": "answer"}  # what is taught, by the kind of data


@dataclass
class DryRun:
    """The model, objective and random data of a recipe, without weights and without reading the data."""

    recipe: Recipe
    model: Model  # on the device "meta"
    objective: Objective
    data: Dataset
    has_teacher: bool  # or a reference: a second model without weights
    notes: list[str]  # assumptions made, for printing

    def batch(self, n: int) -> Batch:
        """A batch of n examples."""
        return self.data.batch([Draw(0, i % len(self.data)) for i in range(n)], seed=0)


def dry_run(recipe: Recipe) -> DryRun:
    """Set up a recipe without weights: shapes, objective, and random examples as large as the real ones."""
    notes: list[str] = []
    begin = without_weights(recipe.model["init_from"]) if "init_from" in recipe.model else None
    teacher = without_weights(recipe.objective.teacher) if recipe.objective.name == "distill" else None
    examples = RandomExamples(recipe)
    if recipe.data.kind == "images" and not recipe.data.source and "size" in recipe.model:
        data = RecipeData(blank_images(recipe), None)
    elif recipe.data.kind in ("images", "pixels", "reversal"):
        data = load_data(recipe, None)
    else:
        data = _assume_data(recipe, begin or teacher, examples, notes)
    if begin is not None:
        config = pretrained_config(begin, recipe, data.settings)
        model: Model = type(begin).create(config, device="meta")
    elif teacher is not None and not recipe.model:
        model = halve(teacher)
    else:
        model = new_model(choose_model(recipe, data), device="meta")
    adapt(model, recipe.adapter)
    examples.model = model
    recipe = count_steps(recipe, len(data.train), notes)
    reference = begin if needs_reference(recipe) else None
    if recipe.objective.name == "grpo":
        notes.append("the time is that of updates: sampling completions comes on top")
    objective = recipe_objective(recipe, teacher, reference, lambda model, batch: batch)
    has_teacher = teacher is not None or reference is not None
    return DryRun(recipe, model, objective, data.train, has_teacher, notes)


def blank_images(recipe: Recipe) -> LabelledImages:
    """Images as the model of a published size reads them."""
    config = new_model(dict(recipe.model), device="meta").config
    shape = (recipe.train.batch_size, config.n_channels, config.image_size, config.image_size)
    names = [str(i) for i in range(config.n_labels)]
    return LabelledImages(ImageSet.of(np.zeros(shape, np.uint8), np.zeros(shape[0]), names=names))


def without_weights(name: str) -> Model:
    """A model that is on this machine, on the device "meta"."""
    return load_meta(_local(name))


def _local(name: str) -> Path:
    if name in shipped_models() or Path(os.path.expanduser(name)).exists() or not hub.is_id(name):
        return resolve_model(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise ValueError(
            f"{name} is not on this machine, and an estimate downloads nothing: load it once, or estimate with a "
            "published size of its family (--set model.size=..., see `heedful models`)"
        )
    return Path(found).parent


def _assume_data(recipe: Recipe, begin: Model | None, examples: RandomExamples, notes: list[str]) -> RecipeData:
    """The amount of data and the vocabulary size, estimated from file sizes instead of reading."""
    data, settings = recipe.data, recipe.tokenizer
    n_bytes = _size_of(recipe)
    if n_bytes is None:
        notes.append("the data is not here: its size and vocabulary are assumed")
    kind, n = settings.kind, settings.vocab_size or None
    if begin is not None and not settings.path:
        kind, n = "a model's", begin.config.vocab_size
    elif settings.path:
        kind, n = "a model's", without_weights(settings.path).config.vocab_size
    elif kind == "bytes":
        n = len(byte_tokens())
    elif n_bytes is not None:
        kind, n = choose_vocabulary(recipe, n_bytes if n_bytes > LARGE else None)
        if n is None:
            n = len(make_tokenizer(kind, None, recipe))
        else:
            notes.append(f"a {kind} vocabulary of {n:,} tokens is assumed, not yet trained")
    n_tokens = int((n_bytes or 10**6) / BYTES_PER_TOKEN.get(kind, DEFAULT_BYTES_PER_TOKEN))
    asked: dict[str, Any] = {"vocab_size": n or DEFAULT_VOCAB_SIZE}
    if n_bytes is None and n is None and ("vocab_size" in recipe.model or "size" in recipe.model):
        asked = {}  # the model's own vocabulary is the best guess
    if data.kind == "pairs":
        asked["start_id"] = 0
    if data.kind == "labelled" and recipe.objective.name == "regress":
        asked |= {"n_labels": 1, "problem_type": "regression"}
    examples.n_examples = max(1, n_tokens // data.length)
    return RecipeData(examples, None, n_tokens, asked)


def _size_of(recipe: Recipe) -> int | None:
    """Bytes of the data's files, None if one is missing."""
    if not recipe.data.source:
        return None
    total = 0
    for path, _ in source_paths(recipe.data):
        if not path.exists():
            return None
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        total += sum(p.stat().st_size for p in files)
    return total


class RandomExamples:
    """A dataset of random tokens with the largest shapes that a recipe's data can have."""

    fingerprint = "imagined"
    lengths: np.ndarray | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.n_examples = recipe, 1
        self.model: Model | None = None

    def __len__(self) -> int:
        return self.n_examples

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        model, data = self.model, self.recipe.data
        assert model is not None, "the examples are made for a model"
        shape = (len(draws), data.length)
        random = torch.Generator().manual_seed(seed + draws[0].index)

        def some(most: int, *shape: int) -> torch.Tensor:
            return torch.randint(max(1, most), shape, generator=random)

        n_logits = logits_width(model)
        vocab_size = getattr(model.config, "vocab_size", n_logits)
        name = self.recipe.objective.name
        if name == "distill":
            name = DISTILLED.get(data.kind) or ("causal" if isinstance(model, DecoderModel) else "masked")
        if name in ("seq2seq", "spans"):
            n_out = data.length
            if name == "spans":
                n_out = math.ceil(data.length * data.masked * (1 + 1 / data.span)) + 1
            out = some(n_logits, shape[0], n_out)
            return Batch(tokens=out, source=some(vocab_size, *shape), targets=out)
        if name in ("dpo", "grpo"):
            n = 2 if name == "dpo" else self.recipe.objective.group
            width = data.length + (self.recipe.objective.max_tokens if name == "grpo" else 0)
            tokens = some(vocab_size, shape[0], n, width)
            return Batch(tokens, targets=tokens, rewards=some(2, shape[0], n).float() if name == "grpo" else None)
        tokens = some(vocab_size, *shape)
        if name == "causal":
            documents = None
            if data.documents and self._several():
                documents = (torch.arange(data.length) >= data.length // 2).long().repeat(shape[0], 1)
            return Batch(tokens, documents=documents, targets=some(n_logits, *shape))
        if name == "cbow":
            return Batch(tokens)
        if name == "masked":
            return self._masked(model, tokens, some(n_logits, *shape), random)
        labels = {
            "regress": torch.zeros(shape[0]),
            "multi_label": torch.zeros(shape[0], n_logits),
            "tag": some(n_logits, *shape),
            "answer": some(data.length, shape[0], 2),
        }
        return Batch(tokens, targets=labels.get(name, some(n_logits, shape[0])))

    def _masked(self, model: Model, tokens: torch.Tensor, targets: torch.Tensor, random: torch.Generator) -> Batch:
        hidden = torch.rand(tokens.shape, generator=random) < self.recipe.data.masked
        made = Batch(tokens, targets=targets.masked_fill(~hidden, IGNORED))
        if isinstance(getattr(model, "head", None), PretrainingHead):
            n_rows = len(tokens)
            made = dataclasses.replace(
                made, segments=torch.zeros_like(tokens), next_sentence=torch.zeros(n_rows, dtype=torch.int64)
            )
        return made

    def _several(self) -> bool:
        """Whether the data has several documents, judged by its file names."""
        if isinstance(self.model, EncoderDecoderModel) or not self.recipe.data.source:
            return False
        paths = [path for path, _ in source_paths(self.recipe.data)]
        return any(p.is_dir() or {".jsonl", ".csv", ".tsv"} & set(p.suffixes) for p in paths)
