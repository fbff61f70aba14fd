"""The options of `Loaded.generate` and its kin: which exclude each other, and the requests and drafters they become."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal, cast

from heedful.generate.draft import Drafter, DraftModel, PromptLookup
from heedful.generate.grammar import Grammar
from heedful.generate.model_with_tokenizer import ModelWithTokenizer
from heedful.generate.request import Request, Sampling
from heedful.models.base import DecoderModel, GenerativeModel, TruncationWarning
from heedful.models.config import check_names
from heedful.text.prompt import PromptOptions
from heedful.text.tokenizer import Tokenizer


class GenerationOptions(PromptOptions, total=False):
    """How to generate; what is not given is the default. See `heedful.generate.request` for what each means, and
    `heedful.text.prompt` for the options of a prompt."""

    max_tokens: int  # 200
    min_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int  # with beams too
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]  # texts that end the completion and are not part of it
    stop_token_ids: Collection[int]  # tokens that end it, beside those of the model
    ignore_eos: bool  # the model's own end of a text does not end it
    include_stop_str_in_output: bool  # the stop text or token that ends it is part of it
    schema: Any  # JSON that this schema allows: a dict, its JSON text, or a pydantic model class
    regex: str  # a text that all of this regular expression matches
    grammar: str | Grammar  # a text of this context-free grammar, in the notation of Lark or GBNF
    skip_special_tokens: bool  # special tokens are no part of the text (default True)
    n: int  # completions of each prompt; for `complete` alone, as the next three
    best_of: int | None
    logprobs: int | None
    echo: bool
    beams: int  # more than 1: beam search (heedful.generate.beam) instead of sampling
    length_penalty: float
    early_stopping: bool | Literal["never"]
    beam_groups: int
    diversity: float
    draft: Literal["lookup"] | ModelWithTokenizer | None  # speculative decoding: prompt lookup, or a draft model


# Options of a request beside its sampling, with their defaults; others need `complete`, which returns whole results.
RESULT_OPTIONS: dict[str, int | None] = {"n": 1, "best_of": None, "logprobs": None, "echo": False}
GRAMMARS = ("schema", "regex", "grammar")
# Options of beam search, and what `run_beam_search` calls them.
BEAM_OPTIONS = {
    "beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "beam_groups": "groups",
    "diversity": "diversity",
}


def beam_arguments(options: GenerationOptions) -> dict[str, Any]:
    """The arguments of `run_beam_search`; empty unless `beams` is more than 1. ValueError for what excludes it."""
    arguments = {theirs: options[ours] for ours, theirs in BEAM_OPTIONS.items() if ours in options}  # type: ignore[literal-required]
    beams = arguments.get("beams", 1)
    if beams < 1:
        raise ValueError(f"beams is {beams}: it must be 1 or more")
    if beams == 1:
        if wrong := [name for name in BEAM_OPTIONS if name in options and name != "beams"]:
            raise ValueError(f"{', '.join(wrong)}: for beam search alone; give beams=2 or more")
        return {}
    if wrong := excluding_beams(options):
        raise ValueError(f"beam search and {', '.join(wrong)} do not go together: leave one out, or give beams=1")
    return arguments


def excluding_beams(options: GenerationOptions) -> list[str]:
    """The names of the options given that beam search does not take."""
    defaults: dict[str, Any] = {**RESULT_OPTIONS, "draft": None}
    other = [name for name in defaults if name != "n" and options.get(name, defaults[name]) != defaults[name]]
    sampling = [field.name for field in fields(Sampling) if field.name != "no_repeat_ngram_size"]
    grammars = [name for name in GRAMMARS if options.get(name) is not None]
    return [name for name in sampling if name in options] + other + grammars


def grammar_option(options: GenerationOptions) -> Grammar | None:
    """What a completion must match; ValueError for more than one."""
    given: dict[str, Any] = {name: value for name in GRAMMARS if (value := options.get(name)) is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} do not go together: give one of them")
    match given:
        case {"schema": schema}:
            return Grammar.json_schema(schema)
        case {"regex": pattern}:
            return Grammar.regex(pattern)
        case {"grammar": Grammar() as grammar}:
            return grammar
        case {"grammar": text}:
            return Grammar.cfg(text)
    return None


def refuse_result_options(method: str, options: GenerationOptions) -> None:
    """ValueError for options whose outcome is more than one text per prompt, which `method` cannot return."""
    if wrong := [name for name, default in RESULT_OPTIONS.items() if options.get(name, default) != default]:
        raise ValueError(f"{method} gives one text for a prompt: use complete for {', '.join(wrong)}")


def build_requests(
    prompts: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]],
    options: GenerationOptions,
    *,
    stop_ids: Collection[int],
    banned_ids: Collection[int],
) -> list[Request]:
    """A request for each encoded prompt (decoder's ids, encoder's ids); `stop_ids` end a completion, `banned_ids` are
    never generated."""
    rest: dict[str, Any] = dict(options)
    check_names(rest, [*GenerationOptions.__annotations__], "generation")
    stop, max_tokens = rest.pop("stop", ()), rest.pop("max_tokens", 200)
    ends = frozenset() if rest.pop("ignore_eos", False) else frozenset(stop_ids)
    ends |= frozenset(rest.pop("stop_token_ids", ()))
    names = (*RESULT_OPTIONS, "min_tokens", "include_stop_str_in_output", "skip_special_tokens")
    more = {name: rest.pop(name) for name in names if name in rest}
    more["grammar"] = grammar_option(options)
    others = (*BEAM_OPTIONS, *GRAMMARS, *PromptOptions.__annotations__, "draft")
    rest = {name: value for name, value in rest.items() if name not in others}
    if banned_ids:
        rest["logit_bias"] = dict.fromkeys(banned_ids, -100.0) | rest.get("logit_bias", {})
    sampling = Sampling(**rest)
    more["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    more["stop_ids"] = ends
    return [Request(*ids, max_tokens, sampling, **more) for ids in prompts]


def prompt_options(options: GenerationOptions, context_length: int | None) -> PromptOptions:
    """Those that `tokenize_prompt` takes; a truncation of -1 becomes what max_tokens leaves of the context."""
    found = {name: value for name, value in options.items() if name in PromptOptions.__annotations__}
    if found.get("truncate_prompt_tokens") == -1:
        left = None if context_length is None else max(1, context_length - options.get("max_tokens", 200))
        found["truncate_prompt_tokens"] = left
    return cast(PromptOptions, found)


def warn_beyond_context(context_length: int, requests: Sequence[Request]) -> None:
    """Warn of the first request whose max_tokens are more than the context has room for after its prompt."""
    for request in requests:
        room = context_length - max(1, len(request.prompt)) + 1  # the last token needs no position
        if request.max_tokens > room:
            where = " after the prompt" if request.prompt else ""
            told = f"max_tokens is {request.max_tokens}, and the context of {context_length} tokens has room for {room}"
            return warnings.warn(f"{told}{where}: the answer ends there at the latest", TruncationWarning, stacklevel=2)


def make_drafter(target: ModelWithTokenizer, draft: Literal["lookup"] | ModelWithTokenizer | None) -> Drafter | None:
    """The drafter of speculative decoding; ValueError unless a draft model has the target's tokens and architecture
    (both decoders, or both encoder-decoders)."""
    assert target.tokenizer is not None
    if draft is None:
        return None
    if draft == "lookup":
        return PromptLookup(in_source=target.tokenizer.target is target.tokenizer)
    if not isinstance(getattr(draft, "model", None), GenerativeModel):
        raise ValueError(f'draft is {draft!r}: it must be "lookup" or a loaded model that generates')
    if draft.tokenizer is None or not same_vocabulary(target.tokenizer, draft.tokenizer):
        raise ValueError(f"{draft.name} cannot draft for {target.name}: their tokenizers differ")
    alike = isinstance(draft.model, DecoderModel) == isinstance(target.model, DecoderModel)
    if not alike or draft.model.device != target.model.device:
        raise ValueError(
            f"{draft.name} cannot draft for {target.name}: both must continue a prompt or both answer a source, "
            f"on one device, not on {draft.model.device} and {target.model.device}"
        )
    return DraftModel(cast(GenerativeModel[Any], draft.model))


@lru_cache(maxsize=8)
def same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether ids mean the same tokens to both, on both sides of a translation."""
    pairs = (one, other), (one.target, other.target)
    return all(a is b or a.backend.get_vocab() == b.backend.get_vocab() for a, b in pairs)
