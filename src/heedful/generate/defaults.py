"""Default options of generation: they follow from what a model is, and from its generation_config.json.

    encoder-decoder    beam search, as its authors evaluate it; greedy where that cannot be (streams, log-probabilities)
    decoder            sampling

The file (`model.generation`) counts where it has a setting, and what the caller gives counts above all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from heedful.generate.options import GenerationOptions, excluding_beams
from heedful.models.base import DecoderModel, Model

BEAMS = 4  # of an encoder-decoder whose file names none: Vaswani et al. 2017, section 6.1
CHAT_MAX_TOKENS = 2048  # of an answer in a chat: it is as long as it needs to be, and some models never end theirs
MAX_BEAMS = 64  # that a file may ask for
FILTERS = ("top_k", "top_p", "min_p", "typical_p")


def default_options(model: Model, given: GenerationOptions, *, stream: bool = False) -> GenerationOptions:
    """The options given, over the model's defaults; with `stream`, without beams."""
    theirs, decodes = model.generation, isinstance(model, DecoderModel)
    options: dict[str, Any] = {}
    if longest := _max_tokens(theirs, decodes):
        options["max_tokens"] = longest
    elif given.get("chat"):
        options["max_tokens"] = chat_max_tokens(model.context_length, given)
    sampling = _sampling(theirs, decodes)
    beams = given.get("beams")
    if beams is None:
        alone = stream or bool(excluding_beams(given)) or theirs.get("do_sample") is True
        beams = 1 if alone else _number(theirs, "num_beams", 1, MAX_BEAMS) or (1 if decodes else BEAMS)
        beams = max(beams, given.get("n", 1)) if beams > 1 else beams
        options["beams"] = beams
    if beams > 1:
        options |= _search(theirs)
    else:
        options |= sampling
        greedy = theirs.get("do_sample") is False or not (decodes or theirs.get("do_sample"))
        if greedy and not any(name in given for name in FILTERS):
            options["temperature"] = 0.0
    return cast(GenerationOptions, options | given)


def chat_max_tokens(context_length: int | None, given: GenerationOptions) -> int:
    """The most tokens of an answer in a chat; a conversation that is truncated to make room has most of the context."""
    if given.get("truncate_prompt_tokens") != -1 or context_length is None:
        return CHAT_MAX_TOKENS
    return max(1, min(CHAT_MAX_TOKENS, context_length // 4))


def _max_tokens(theirs: Mapping[str, Any], decodes: bool) -> int | None:
    """max_new_tokens; or max_length, which counts an encoder-decoder's start token, and of a decoder the prompt."""
    if (n := _number(theirs, "max_new_tokens", 1)) is not None or decodes:
        return n
    n = _number(theirs, "max_length", 1)
    return n - 1 if n is not None and n > 1 else None


def _sampling(theirs: Mapping[str, Any], decodes: bool) -> dict[str, Any]:
    """The sampling parameters of the file; the hub's names are ours, and its top_k of 0 is none."""
    options: dict[str, Any] = {}
    if theirs.get("do_sample", decodes):
        found = {name: _number(theirs, name, 0) for name in ("temperature", *FILTERS)}
        options = {name: value for name, value in found.items() if value is not None and (name, value) != ("top_k", 0)}
    penalty = _number(theirs, "repetition_penalty", 0)
    return options | ({} if penalty is None else {"repetition_penalty": penalty})


def _search(theirs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("length_penalty", "early_stopping")
    return {name: theirs[name] for name in names if theirs.get(name) is not None}


def _number(theirs: Mapping[str, Any], name: str, least: float, most: float = float("inf")) -> Any:
    """A number of the file, None if it has none; ValueError for anything else."""
    value = theirs.get(name)
    if value is None:
        return None
    whole = name in ("num_beams", "max_new_tokens", "max_length", "top_k")
    if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
        upper = f" to {most:g}" if most < float("inf") else " or more"
        raise ValueError(
            f"{name} is {str(value)[:50]!r} in generation_config.json: it must be a number, {least:g}{upper}"
        )
    return value
