"""Translate as the model's authors do: the generation options that its files name."""

from __future__ import annotations

from typing import Any, cast

from heedful.generate.options import GenerationOptions
from heedful.models.base import Model

BEAMS = 4  # where the files name none: Vaswani et al. 2017, section 6.1


def translation_options(model: Model, given: GenerationOptions) -> GenerationOptions:
    """The options given, over the beams, length penalty and longest answer of generation_config.json
    (`model.generation`)."""
    theirs = model.generation
    options: dict[str, Any] = {"beams": theirs.get("num_beams") or BEAMS}
    longest = theirs.get("max_new_tokens") or (theirs.get("max_length") or 1) - 1  # max_length counts the start token
    options |= {"max_tokens": longest} if longest else {}
    if given.get("beams", options["beams"]) > 1:
        names = ("length_penalty", "early_stopping")
        options |= {name: theirs[name] for name in names if theirs.get(name) is not None}
    else:
        options["temperature"] = 0
    return cast(GenerationOptions, options | given)
