"""The blanks of a template filled by several models: "[bert-books|shakespeare]: My lord, _".

The models are the template's first bracket, so that everything that compares sentences compares models: a model's
association scores are those of an alternative. They are compared by words that all of them know. A model of characters
knows letters alone; beside one that knows words it spells those out.
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
    """A model to be asked for its sentences: about these words, or all it knows; `rescore` as `fill` has it."""

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
    """`fill` by each of the models that a template names."""
    steps = compare_models(template, words, n)
    ask = next(steps)
    while True:
        part = fill_template(*models[ask.model], template.of(ask.model), words=ask.words, n=None, rescore=ask.rescore)
        try:
            ask = steps.send(part)
        except StopIteration as end:
            found: Filled = end.value
            return found


def compare_models(
    template: Template, words: Sequence[str] | None, n: int | None
) -> Generator[FillRequest, Filled, Filled]:
    """The questions to the models of a template, one after the other; for whoever has them, wherever they are."""
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
    # Causal models read each word with what follows the blank, where there are not too many of them.
    rescored = template.goes_on and len(chosen) <= RESCORED and any(p.method == "next" for p in parts.values())
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
    """What several models found, one's sentences under the other's: of the words that all of them know, the likeliest
    n of each sentence; None: all."""
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
    if "both" in methods:  # a causal model's are probabilities among these words: so are all, then
        return Filled(template, words, logprobs.log_softmax(dim=-1), "both")
    if len(methods) > 1:
        methods = {"pieces"} if methods == {"masked", "pieces"} else {"mixed"}
    return Filled(template, words, logprobs, methods.pop())
