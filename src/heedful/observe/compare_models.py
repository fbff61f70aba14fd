"""Fill a template with several models and compare them: "[bert-books|shakespeare]: My lord, _".

The models are the alternatives of the template's first bracket, so that whatever compares sentences compares models.
They are compared on the words in the vocabulary of all. A character-level model beside word-level ones scores their
words spelled out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from heedful.models.base import Model
from heedful.observe.fill import RESCORED, Filled, fill_template
from heedful.observe.template import Template
from heedful.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillRequest:
    """One call of `fill_template`: the model's name, the words (None: its vocabulary), and `rescore`."""

    model: str
    words: Sequence[str] | None
    rescore: bool | None


def fill_by_models(
    template: Template,
    models: Mapping[str, tuple[Model, Tokenizer]],
    *,
    words: Sequence[str] | None = None,
    n: int | None = 30,
) -> Filled:
    """`fill_template` with each of the models that a template names, merged into one result."""
    steps = compare_models(template, words, n)
    ask = next(steps)
    while True:
        part = fill_template(
            *models[ask.model], template.for_model(ask.model), words=ask.words, n=None, rescore=ask.rescore
        )
        try:
            ask = steps.send(part)
        except StopIteration as end:
            found: Filled = end.value
            return found


def compare_models(
    template: Template, words: Sequence[str] | None, n: int | None
) -> Generator[FillRequest, Filled, Filled]:
    """A generator that yields the calls of `fill_template` it needs, is sent their results, and returns the merged one;
    so the caller decides where the models run."""
    parts: dict[str, Filled] = {}
    for name in template.models:
        parts[name] = yield FillRequest(name, words, False if words is None else None)
    if words is not None:
        return merge_fills(template, list(parts.values()), None)
    whole = {name: part for name, part in parts.items() if any(len(word) > 1 for word in part.words)}
    spelled = bool(whole) and len(whole) < len(parts)
    found = merge_fills(template, list((whole if spelled else parts).values()), n)
    chosen = found.words
    if spelled:
        letters = [set(part.words) for name, part in parts.items() if name not in whole]
        order = found.mean().argsort(descending=True, stable=True).tolist()
        known = (found.words[i] for i in order if all(set(found.words[i]) <= some for some in letters))
        chosen = [word for word, _ in zip(known, range(RESCORED), strict=False)]
        if not chosen:
            raise ValueError("these models have no word in common: give the words to compare")
    # Causal models score each word together with the text after the blank, if there are few enough words.
    rescored = (
        template.has_text_after_blank and len(chosen) <= RESCORED and any(p.method == "next" for p in parts.values())
    )
    if not spelled and not rescored:
        return found
    for name, part in parts.items():
        if name not in whole or (rescored and part.method == "next"):
            parts[name] = yield FillRequest(name, chosen, None)
        else:
            places = [part.words.index(word) for word in chosen]
            parts[name] = Filled(part.template, chosen, part.logprobs[:, places], part.method)
    return merge_fills(template, list(parts.values()), None)


def merge_fills(template: Template, parts: Sequence[Filled], n: int | None) -> Filled:
    """Concatenate the sentences of several models: the words known to all, or the likeliest n of each sentence."""
    known = [{word: i for i, word in enumerate(part.words)} for part in parts]
    words = [word for word in known[0] if all(word in places for places in known)]
    if not words:
        raise ValueError("these models have no word in common that is one token of all: give the words")
    rows = [part.logprobs[:, [places[word] for word in words]] for part, places in zip(parts, known, strict=True)]
    logprobs = torch.cat(rows)
    if n is not None:
        order = logprobs.argsort(dim=1, descending=True, stable=True)[:, :n]
        kept = list(dict.fromkeys(order.flatten().tolist()))
        words, logprobs = [words[i] for i in kept], logprobs[:, kept]
    methods = {part.method for part in parts}
    if "both" in methods:  # normalized over these words, so all must be
        return Filled(template, words, logprobs.log_softmax(dim=-1), "both")
    if len(methods) > 1:
        methods = {"pieces"} if methods == {"masked", "pieces"} else {"mixed"}
    return Filled(template, words, logprobs, methods.pop())
