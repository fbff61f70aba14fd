"""What a model is for: its purpose in one word, what it is good at and where it fails, from its card or the catalog,
else from what models of its kind can do."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from heedful.models.base import DecoderModel, Model
from heedful.models.vit import ViT
from heedful.weights.catalog import catalog, pulled_models
from heedful.zoo import FOLDER, cards, read_card

Purpose = Literal[
    "chat",
    "write",
    "fill",
    "translate",
    "classify",
    "tag",
    "answer",
    "embed",
    "classify_image",
    "complete_image",
    "other",
]
ABILITIES: tuple[Purpose, ...] = ("complete_image", "translate", "classify", "tag", "answer", "fill", "embed")

# Of models whose authors do not say it here: good at, fails at.
USUAL: dict[Purpose, tuple[str, str]] = {
    "chat": ("questions and short tasks, asked in turns", "facts, which it invents; sums; long texts"),
    "write": ("going on with a text like those it has read", "instructions and questions, which it only goes on with"),
    "fill": ("words that fit a blank", "writing a text of its own; more than one missing word"),
    "translate": ("sentences like those it was trained on", "other languages and other kinds of text"),
    "classify": ("texts like those it was trained on", "a text that no label of its fits: it chooses one all the same"),
    "tag": ("texts like those it was trained on", "other languages, other kinds of names"),
    "answer": ("questions whose answer stands in a passage", "what the passage does not say; reasoning"),
    "embed": ("how alike two texts are", "writing; answers"),
    "classify_image": ("images like those it was trained on", "images of anything else: it names a label all the same"),
    "complete_image": ("images like those it was trained on", "images of anything else"),
    "other": ("being looked into", "tasks: it was trained for none"),
}  # fmt: skip


def model_purpose(model: Model, chats: bool) -> Purpose:
    """What a model is for first of all."""
    if isinstance(model, ViT):
        return "classify_image" if "classify" in model.abilities else "other"
    if "generate" in model.abilities and isinstance(model, DecoderModel) and "complete_image" not in model.abilities:
        return "chat" if chats else "write"
    return next((ability for ability in ABILITIES if ability in model.abilities), "other")


def strengths(path: Path, purpose: Purpose) -> tuple[str, str]:
    """What a model is good at and where it fails: a few words each."""
    good, bad = "", ""
    if path.parent == FOLDER and path.name in cards():
        facts = read_card(path).facts
        good, bad = facts.get("good at", ""), facts.get("fails at", "")
    elif path in pulled_models().values() and path.stem in catalog():
        good, bad = catalog()[path.stem].good_at, catalog()[path.stem].fails_at
    usual = USUAL[purpose]
    return good or usual[0], bad or usual[1]
