"""From what a user names, a recipe, a data file, a model to fine-tune, to a validated recipe."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.data.images import common_size
from heedful.data.recognise import Recognised, recognise
from heedful.models.base import DecoderModel
from heedful.models.config import did_you_mean
from heedful.models.encoder import EncoderModel
from heedful.recipes.data_paths import change_recipe, check_data_is_here
from heedful.train.recipe import Recipe, merge_tables, read_recipe, shipped_recipes
from heedful.weights.meta import load_meta
from heedful.weights.resolve import resolve_model

CHAT_MODEL = "chat"  # that learns conversations where no other model is named
# The names of --as, and the kinds of data that they are.
KINDS = {"text": "text", "labels": "labelled", "pairs": "pairs", "chat": "chat", "images": "images"}

# Settings of `heedful train my.txt`: tuned on 1 MB of text, good for more.
PATIENCE = 3  # evaluations without a better one, of ten in all: what is small is learned by heart soon
AUTOMATIC: dict[str, Any] = {
    "data": {"length": 128},
    "train": {"steps": 1000, "batch_size": 16, "patience": PATIENCE},
    "optimizer": {"name": "muon", "lr": 0.01, "muon_lr": 0.025, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "schedule": {"name": "cosine", "warmup": 50, "final": 0.05},
}
# The same for fine-tuning: a low learning rate, or the model forgets.
FINE_TUNING: dict[str, Any] = {
    "data": {"length": 128},
    "train": {"steps": 300, "batch_size": 8, "patience": PATIENCE},
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
    "train": {"steps": 1000, "batch_size": 32, "patience": PATIENCE},
    "optimizer": {"name": "muon", "lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1},
    "schedule": {"warmup": 50, "final": 0.0},
}
USUAL_SIZE = 64  # that the images of a folder are resized to if they differ, or are large

# Of labelled texts: a small encoder from scratch, as the recipe distilbert. With a thousand sentences of SST-2 it is as
# good as bert-books fine-tuned, in half of the time, and knows every language.
LABELLED: dict[str, Any] = {
    "model": {"family": "distilbert", "d_model": 128, "n_layers": 2, "n_heads": 4, "d_ff": 256},
    "data": {"kind": "labelled", "length": 128},
    "objective": {"name": "classify"},
    "train": {"batch_size": 32, "eval_batches": 100, "patience": PATIENCE},
    "optimizer": {"name": "adamw", "lr": 5e-4, "betas": [0.9, 0.98], "weight_decay": 0.1},
    "schedule": {"name": "linear", "warmup": 30, "final": 0.0},
}
LABELLED_STEPS = (5, 200, 2000)  # passes over the data, and the least and the most steps that they may be
# Of pairs: the original Transformer, smaller than in the recipe captions.
PAIRS: dict[str, Any] = {
    "model": {"family": "transformer", "d_model": 128, "n_layers": 2, "n_heads": 4, "d_ff": 512, "dropout": 0.1},
    "data": {"kind": "pairs", "length": 128},
    "objective": {"name": "seq2seq", "smoothing": 0.1},
    "train": {"batch_size": 64, "eval_batches": 50, "patience": PATIENCE},
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup": 100, "final": 0.05},
}
PAIRS_STEPS = (20, 300, 2000)
# Of what only a trained encoder learns in reasonable time.
FROM_ENCODER: dict[str, Any] = merge_tables(
    FINE_TUNING,
    {"train": {"batch_size": 16, "eval_batches": 50}, "optimizer": {"lr": 2e-4}},
)
FINE_TUNING_STEPS = (3, 150, 1000)
ENCODER = "bert-books"


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe, a name for its run, and what was chosen for the user."""

    name: str
    recipe: Recipe
    notes: list[str] = field(default_factory=list)


def resolve_recipe(
    what: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    init_from: str | None = None,
    kind: str = "",
    sample: bool = False,
    needs_data: bool = True,
) -> ResolvedRecipe:
    """The recipe of a shipped name, a .toml file, or a path to data, with `changes`.

    `init_from` is a model to fine-tune, `kind` what data is read as (KINDS; "": what it is recognised as). With
    `sample` a shipped recipe has a small sample instead of its data. If it `needs_data`, missing data is an error.
    """
    text, path, changes = str(what), Path(os.path.expanduser(what)), changes or {}
    shipped, notes = text in shipped_recipes(), list[str]()
    if kind and kind not in KINDS:
        raise ValueError(f"data is read as {', '.join(KINDS)}, not as {kind!r}")
    if shipped or (path.suffix == ".toml" and path.is_file()):
        if kind:
            raise ValueError(f"--as says what a data file is, and {text} is a recipe: set its data.kind")
        name, given = text if shipped else path.stem, read_recipe(shipped_recipes()[text] if shipped else path)
        if shipped and needs_data and not sample and "source" not in changes.get("data", {}):
            check_data_is_here(name, given.get("data", {}))
    elif path.exists():
        if sample:
            raise ValueError(f"--sample is for recipes that ship, and {text} is data: leave it out")
        name = path.name.partition(".")[0] or "run"
        automatic, init_from, notes = _settings_for_data(path, changes, init_from, KINDS.get(kind, ""))
        given = merge_tables({"data": {"source": str(path)}}, automatic)
    else:
        hint = did_you_mean(text, shipped_recipes())
        known = ", ".join(shipped_recipes())
        raise ValueError(f"there is no file, folder or recipe {text!r}{hint}; recipes that ship: {known}")
    given, more = change_recipe(given, changes, sample=sample)
    if init_from is not None:
        given["model"] = {**changes.get("model", {}), "init_from": init_from}
    made = Recipe.from_dict(given)
    return ResolvedRecipe(f"{name}-sample" if sample else name, made, [*notes, *more])


def _settings_for_data(
    path: Path, changes: Mapping[str, Any], init_from: str | None, kind: str
) -> tuple[dict[str, Any], str | None, list[str]]:
    """The settings for a data file or folder, the model to begin from, and what was recognised and chosen."""
    changed = changes.get("data", {})
    init_from = init_from or changes.get("model", {}).get("init_from")
    learner = _kind_of_model(init_from)
    wanted = kind or changed.get("kind", "") or _kind_of_columns(changed, learner)
    data = recognise(path, wanted, answers_are_pairs=learner != "decoder")
    if wanted == "prompts":
        if init_from is None:
            raise ValueError(f"rewards teach a model that is trained already: heedful train MODEL {path}")
        return _in_steps(REWARDED, changes), init_from, []
    if data.kind == "chat" and learner == "encoder-decoder":
        data = recognise(path, "pairs")
    settings: dict[str, Any] = AUTOMATIC if init_from is None else FINE_TUNING
    trains = "trains a new language model (LLaMA's form)" if init_from is None else f"fine-tunes {init_from}"
    if data.kind == "text" and learner == "encoder":
        settings = merge_tables(FINE_TUNING, {"data": {"pairs": False}, "objective": {"name": "masked"}})
    elif data.kind == "chat" and init_from is None and _has_model(changes):
        settings = merge_tables(AUTOMATIC, {"train": {"patience": 0}})  # of few conversations none are held out
    elif data.kind in ("chat", "preferences"):
        settings = _in_steps(CHAT if data.kind == "chat" else PREFERENCES, changes)
        init_from = init_from or CHAT_MODEL
        trains = f"fine-tunes {init_from} with adapters (LoRA); another model: heedful train MODEL {path}"
    elif data.kind == "images":
        source = Path(data.settings.get("source", path))
        settings = _image_settings(source, init_from)
        trains = "trains a small Vision Transformer" if init_from is None else trains
    elif data.kind == "labelled":
        few = _steps(data.n_rows, LABELLED if init_from is None else FROM_ENCODER, init_from is None)
        settings = merge_tables(LABELLED if init_from is None else FROM_ENCODER, few)
        trains = f"trains a small classifier; `heedful train {ENCODER} {path}` fine-tunes a model instead"
        if init_from is not None:
            trains = f"fine-tunes {init_from}"
    elif data.kind == "pairs":
        few = _steps(data.n_rows, PAIRS if init_from is None else FROM_ENCODER, init_from is None, PAIRS_STEPS)
        settings = merge_tables(PAIRS if init_from is None else FROM_ENCODER, few)
        trains = "trains a small Transformer that writes the second text for the first" if init_from is None else trains
    elif data.kind in ("tagged", "answers") and not wanted:
        init_from = init_from or ("" if _has_model(changes) else ENCODER) or None
        settings, trains = FROM_ENCODER, f"fine-tunes {init_from}"
        data = Recognised(data.kind, data.about, data.settings, {"tagged": "tag", "answers": "answer"}[data.kind])
    elif data.kind not in KINDS.values():
        return _without_patience(settings, changed), init_from, []  # all else is said by the user
    chosen = {"data": {**data.settings, "kind": data.kind}}
    if data.objective:
        chosen["objective"] = {"name": data.objective}
    if _has_model(changes):  # whose settings are not those of another family
        settings = {key: value for key, value in settings.items() if key != "model"}
        trains = "trains the model that was set"
    notes = [f"{path}: {data.about}", f"{trains}; --as {'|'.join(KINDS)} reads the data as something else"]
    return merge_tables(_without_patience(settings, changed), chosen), init_from, notes


def _kind_of_model(name: str | None) -> str:
    """What a model that is to be fine-tuned is: "decoder", "encoder", "encoder-decoder"; "" if it cannot be known."""
    if name is None:
        return ""
    model = load_meta(resolve_model(name))
    if "translate" in model.abilities:
        return "encoder-decoder"
    return "decoder" if isinstance(model, DecoderModel) else "encoder" if isinstance(model, EncoderModel) else ""


def _kind_of_columns(changed: Mapping[str, Any], learner: str) -> str:
    """What data is by the columns that the user names: a label, a target, or a text alone."""
    if changed.get("label"):
        return "labelled"
    if changed.get("target"):
        return "chat" if learner == "decoder" else "pairs"
    return "text" if changed.get("text") else ""


def _has_model(changes: Mapping[str, Any]) -> bool:
    """Whether the user says what the model is, or that it learns from a teacher."""
    return bool({"family", "size", "init_from"} & changes.get("model", {}).keys()) or bool(
        changes.get("objective", {}).get("teacher")
    )


def _in_steps(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that count passes over the data, which count steps if the user does."""
    return merge_tables(settings, {"train": {"epochs": 0}}) if "steps" in changes.get("train", {}) else settings


def _steps(
    n_rows: int, settings: Mapping[str, Any], fresh: bool, of_fresh: tuple[int, int, int] = LABELLED_STEPS
) -> dict[str, Any]:
    """train.steps for so many rows: some passes over them, within bounds."""
    passes, least, most = of_fresh if fresh else FINE_TUNING_STEPS
    steps = math.ceil(passes * n_rows / settings["train"]["batch_size"])
    return {"train": {"steps": min(most, max(least, steps))}}


def _without_patience(settings: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that do not look at a validation loss, if the user wants no validation data."""
    if changed.get("share") == 0 and not changed.get("validation") and "patience" in settings["train"]:
        return merge_tables(settings, {"train": {"patience": 0}})
    return settings


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
