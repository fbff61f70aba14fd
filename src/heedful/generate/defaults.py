"""Default options of generation: they follow from what a model is, and from its generation_config.json.

    encoder-decoder    beam search, as its authors evaluate it; greedy where that cannot be (streams, log-probabilities)
    decoder            sampling

The file (`model.generation`) counts where it has a setting, and what the caller gives counts above all. Settings of the
file that would change the text and are not followed are told by a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

from heedful.generate.options import GenerationOptions, excluding_beams
from heedful.models.base import DecoderModel, Model

BEAMS = 4  # of an encoder-decoder whose file names none: Vaswani et al. 2017, section 6.1
CHAT_MAX_TOKENS = 2048  # of an answer in a chat: it is as long as it needs to be, and some models never end theirs
WHOLE = (
    "num_beams", "num_beam_groups", "max_new_tokens", "max_length", "min_new_tokens", "min_length", "top_k",
    "no_repeat_ngram_size",
)  # fmt: skip
MAX_BEAMS = 64  # that a file may ask for
# Settings that are not followed, with the values by which they change nothing.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "force_words_ids": ([],),
    "constraints": ([],),
    "stop_strings": ([], ""),
    "max_time": (),
    "watermarking_config": ({},),
}
FILTERS = ("top_k", "top_p", "min_p", "typical_p")


def default_options(model: Model, given: GenerationOptions, *, stream: bool = False) -> GenerationOptions:
    """The options given, over the model's defaults; with `stream`, without beams."""
    theirs, decodes = model.generation, isinstance(model, DecoderModel)
    _warn_of_others(theirs, decodes)
    options: dict[str, Any] = {}
    if longest := _max_tokens(theirs, decodes):
        options["max_tokens"] = longest
    elif given.get("chat"):
        options["max_tokens"] = chat_max_tokens(model.context_length, given)
    if least := _min_tokens(theirs, decodes):
        options["min_tokens"] = min(least, given.get("max_tokens", options.get("max_tokens", least)))
    if size := _number(theirs, "no_repeat_ngram_size", 0):
        options["no_repeat_ngram_size"] = size
    sampling = _sampling(theirs, decodes)
    beams = given.get("beams")
    if beams is None:
        alone = stream or bool(excluding_beams(given)) or theirs.get("do_sample") is True
        beams = 1 if alone else _number(theirs, "num_beams", 1, MAX_BEAMS) or (1 if decodes else BEAMS)
        beams = max(beams, given.get("n", 1)) if beams > 1 else beams
        options["beams"] = beams
    if beams > 1:
        options |= _search(theirs, beams)
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


def _min_tokens(theirs: Mapping[str, Any], decodes: bool) -> int | None:
    """min_new_tokens; or min_length of an encoder-decoder, which counts the start token."""
    if (n := _number(theirs, "min_new_tokens", 0)) is not None or decodes:
        return n
    n = _number(theirs, "min_length", 0)
    return n - 1 if n else None


def _search(theirs: Mapping[str, Any], beams: int) -> dict[str, Any]:
    names = ("length_penalty", "early_stopping")
    found = {name: theirs[name] for name in names if theirs.get(name) is not None}
    groups = _number(theirs, "num_beam_groups", 1) or 1
    if groups > 1 and beams % groups == 0:
        found |= {"beam_groups": groups, "diversity": _number(theirs, "diversity_penalty", 0) or 0.0}
    return found


def _warn_of_others(theirs: Mapping[str, Any], decodes: bool) -> None:
    """Warn of the settings of the file that would change the text and are not followed."""
    known = NOT_FOLLOWED | ({"min_length": (0,)} if decodes else {})
    names = [name for name, same in known.items() if theirs.get(name) is not None and theirs[name] not in same]
    names += ["bad_words_ids"] * any(len(ids) > 1 for ids in theirs.get("bad_words_ids") or ())
    if names:
        warnings.warn(f"generation_config.json has {', '.join(names)}, not followed here", stacklevel=3)


def _number(theirs: Mapping[str, Any], name: str, least: float, most: float = float("inf")) -> Any:
    """A number of the file, None if it has none; ValueError for anything else."""
    value = theirs.get(name)
    if value is None:
        return None
    whole = name in WHOLE
    if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
        upper = f" to {most:g}" if most < float("inf") else " or more"
        raise ValueError(
            f"{name} is {str(value)[:50]!r} in generation_config.json: it must be a number, {least:g}{upper}"
        )
    return value
