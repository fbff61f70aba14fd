"""How to generate: the settings of `Loaded.generate` and its kin, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from heedful.generate.request import Sampling
from heedful.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from heedful.loaded import Loaded


class Settings(TypedDict, total=False):
    """How to generate; what is not given is the default. See `heedful.generate.request` for what each means."""

    max_tokens: int  # 200
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]  # texts that end the answer and are not part of it
    chat: bool  # put the prompt into the model's chat template
    n: int  # how many answers to each prompt; for `complete`, as the next three
    best_of: int | None
    logprobs: int | None
    echo: bool
    beams: int  # more than 1: beam search, as heedful.generate.beam tells, and nothing by chance
    length_penalty: float
    early_stopping: bool | Literal["never"]
    beam_groups: int
    diversity: float
    draft: Literal["lookup"] | Loaded | None  # guesses tokens ahead, for speed: heedful.generate.draft


# What a request has beside its sampling; more than this default only `complete` can show.
ANSWERING: dict[str, int | None] = {"n": 1, "best_of": None, "logprobs": None, "echo": False}
# The settings of a beam search, by the names that it has for them.
SEARCH = {
    "beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "beam_groups": "groups",
    "diversity": "diversity",
}


def searching(settings: Settings) -> dict[str, Any]:
    """What a beam search is to be told; nothing if none is asked for."""
    search = {theirs: settings[ours] for ours, theirs in SEARCH.items() if ours in settings}  # type: ignore[literal-required]
    beams = search.get("beams", 1)
    if beams < 1:
        raise ValueError(f"beams is {beams}: it must be 1 or more")
    if beams == 1:
        if wrong := [name for name in SEARCH if name in settings and name != "beams"]:
            raise ValueError(f"{', '.join(wrong)}: for beam search alone; give beams=2 or more")
        return {}
    sampling = [field.name for field in fields(Sampling)]
    usual: dict[str, Any] = {**ANSWERING, "draft": None}
    other = [name for name in usual if name != "n" and settings.get(name, usual[name]) != usual[name]]
    if wrong := [name for name in sampling if name in settings] + other:
        raise ValueError(f"beam search and {', '.join(wrong)} do not go together: leave one out, or give beams=1")
    return search


@lru_cache(maxsize=8)
def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether ids mean the same to both, on both sides of a translation."""
    pairs = (one, other), (one.target, other.target)
    return all(a is b or a.backend.get_vocab() == b.backend.get_vocab() for a, b in pairs)
