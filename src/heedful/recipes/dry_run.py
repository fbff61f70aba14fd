"""A training that is only imagined: the model that a recipe means, without weights, and examples of the shapes that its
data will have. Nothing is downloaded, nothing tokenized; what cannot be known without that is supposed, and told.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful.data.dataset import IGNORED, Dataset, Draw
from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel, Model
from heedful.models.encoder import EncoderModel
from heedful.recipes.build import (
    adjusted_config,
    choose_model,
    choose_vocabulary,
    make_objective,
    make_tokenizer,
    new_model,
)
from heedful.recipes.inputs import Read, read, sources
from heedful.text import byte_tokens
from heedful.train.adapters import adapt
from heedful.train.distill import halve
from heedful.train.memory_tracker import logits_width
from heedful.train.objectives import Objective
from heedful.train.recipe import Recipe
from heedful.weights import hub
from heedful.weights.meta import load_meta
from heedful.weights.resolve import resolve, shipped_models

LARGE = 64 * 10**6  # bytes from which on a text's size is enough to choose a vocabulary by, without reading it
BYTES_PER_TOKEN = {"characters": 1.0, "bytes": 1.0}
USUAL_BYTES = 4.0  # of a token of any other kind
USUAL_VOCABULARY = 8192


@dataclass
class Imagined:
    recipe: Recipe
    model: Model  # on the device "meta": shapes alone
    objective: Objective
    data: Dataset
    has_teacher: bool
    notes: list[str]  # what was supposed

    def batch(self, n: int) -> Batch:
        """n examples."""
        return self.data.batch([Draw(0, i % len(self.data)) for i in range(n)], seed=0)


def imagine(recipe: Recipe) -> Imagined:
    notes: list[str] = []
    begin = without_weights(recipe.model["init_from"]) if "init_from" in recipe.model else None
    teacher = without_weights(recipe.objective.teacher) if recipe.objective.name == "distill" else None
    examples = Examples(recipe)
    if recipe.data.kind in ("images", "pixels", "reversal"):
        data = read(recipe, None)
    else:
        data = _suppose(recipe, begin or teacher, examples, notes)
    if begin is not None:
        config = adjusted_config(begin, recipe, data.settings)
        model: Model = type(begin).create(config, device="meta")
    elif teacher is not None and not recipe.model:
        model = halve(teacher)
    else:
        model = new_model(choose_model(recipe, data), device="meta")
    adapt(model, recipe.adapter)
    examples.model = model
    objective = make_objective(recipe, teacher)
    return Imagined(recipe, model, objective, data.train, teacher is not None, notes)


def without_weights(name: str) -> Model:
    """A model that is on this machine, as shapes alone."""
    return load_meta(_local(name))


def _local(name: str) -> Path:
    if name in shipped_models() or Path(name).expanduser().exists() or not hub.is_id(name):
        return resolve(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise ValueError(
            f"{name} is not on this machine, and an estimate downloads nothing: load it once, or estimate with a "
            "published size of its family (--set model.size=..., see `heedful models`)"
        )
    return Path(found).parent


def _suppose(recipe: Recipe, begin: Model | None, examples: Examples, notes: list[str]) -> Read:
    """What reading the data would tell: how much there is, and how many different tokens."""
    data, settings = recipe.data, recipe.tokenizer
    n_bytes = _size_of(recipe)
    if n_bytes is None:
        notes.append("the data is not here: its size and vocabulary are supposed")
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
            notes.append(f"a {kind} vocabulary of {n:,} tokens is supposed, not yet made")
    n_tokens = int((n_bytes or 10**6) / BYTES_PER_TOKEN.get(kind, USUAL_BYTES))
    asked: dict[str, Any] = {"vocab_size": n or USUAL_VOCABULARY}
    if n_bytes is None and n is None and ("vocab_size" in recipe.model or "size" in recipe.model):
        asked = {}  # as good a guess as any
    if data.kind == "pairs":
        asked["start_id"] = 0
    if data.kind == "labelled" and recipe.objective.name == "regress":
        asked |= {"n_labels": 1, "problem_type": "regression"}
    examples.n_examples = max(1, n_tokens // data.length)
    return Read(examples, None, n_tokens, asked)


def _size_of(recipe: Recipe) -> int | None:
    """Bytes of the data's files, None if one is missing."""
    if not recipe.data.source:
        return None
    total = 0
    for path, _ in sources(recipe.data):
        if not path.exists():
            return None
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        total += sum(p.stat().st_size for p in files)
    return total


class Examples:
    """A Dataset of random numbers with the shapes that a recipe's data has at its longest."""

    fingerprint = "imagined"
    lengths: np.ndarray | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.n_examples = recipe, 1
        self.model: Model | None = None

    def __len__(self) -> int:
        return self.n_examples

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        model, data = self.model, self.recipe.data
        assert model is not None, "the examples are made for a model"
        shape = (len(draws), data.length)
        random = torch.Generator().manual_seed(seed + draws[0].index)

        def some(most: int, *shape: int) -> torch.Tensor:
            return torch.randint(max(1, most), shape, generator=random)

        n_said = logits_width(model)
        n_read = getattr(model.config, "vocab_size", n_said)
        name = self.recipe.objective.name
        if name == "distill":
            name = "causal" if isinstance(model, DecoderModel) else "masked"
        if name in ("seq2seq", "spans"):
            n_out = data.length
            if name == "spans":
                n_out = math.ceil(data.length * data.masked * (1 + 1 / data.span)) + 1
            out = some(n_said, shape[0], n_out)
            return Batch(tokens=out, source=some(n_read, *shape), targets=out)
        tokens = some(n_read, *shape)
        if name == "causal":
            documents = None
            if data.documents and self._several():
                documents = (torch.arange(data.length) >= data.length // 2).long().repeat(shape[0], 1)
            return Batch(tokens, documents=documents, targets=some(n_said, *shape))
        if name == "cbow":
            return Batch(tokens)
        if name == "masked":
            return self._masked(model, tokens, some(n_said, *shape), random)
        labels = {
            "regress": torch.zeros(shape[0]),
            "multi_label": torch.zeros(shape[0], n_said),
            "tag": some(n_said, *shape),
            "answer": some(data.length, shape[0], 2),
        }
        return Batch(tokens, targets=labels.get(name, some(n_said, shape[0])))

    def _masked(self, model: Model, tokens: torch.Tensor, targets: torch.Tensor, random: torch.Generator) -> Batch:
        hidden = torch.rand(tokens.shape, generator=random) < self.recipe.data.masked
        made = Batch(tokens, targets=targets.masked_fill(~hidden, IGNORED))
        if isinstance(model, EncoderModel) and model.next_sentence is not None:
            n_rows = len(tokens)
            made = dataclasses.replace(
                made, segments=torch.zeros_like(tokens), next_sentence=torch.zeros(n_rows, dtype=torch.int64)
            )
        return made

    def _several(self) -> bool:
        """Whether the data looks like more than one document."""
        if isinstance(self.model, EncoderDecoderModel) or not self.recipe.data.source:
            return False
        paths = [path for path, _ in sources(self.recipe.data)]
        return any(p.is_dir() or {".jsonl", ".csv", ".tsv"} & set(p.suffixes) for p in paths)
