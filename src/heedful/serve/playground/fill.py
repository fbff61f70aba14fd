"""POST /api/fill and /api/fill/token: how likely each word is in a blank of several sentences, or in place of a token.

A template whose first bracket names served models is filled by each of them, not by `model`: heedful.observe.template.

    N sentences, W words
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.models.base import Batch, DecoderModel
from heedful.observe.compare_models import compare_models
from heedful.observe.fill import METHODS, RESCORED, Filled
from heedful.observe.fill import fill_template as fill_in
from heedful.observe.template import MAX_SENTENCES, Template, parse_template
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.playground.desk import Desk, ask, ask_in_turns
from heedful.serve.playground.shapes import Index, Name, OfText, Passage, reply
from heedful.serve.playground.text import cut
from heedful.serve.request_schema import Count, RequestBody

router = APIRouter()
SHOWN = 30  # words in place of a token

Words = Annotated[list[Passage], Field(min_length=1, max_length=RESCORED)]


class FillBody(RequestBody):
    model: Name
    texts: Annotated[list[Passage], Field(min_length=1, max_length=MAX_SENTENCES)] | None = None
    template: Passage | None = None
    words: Words | None = None  # compare these alone
    n: Annotated[Count, Field(ge=0)] = 30  # of each sentence; 0: all


class TokenBody(OfText):
    index: Index


@router.post("/api/fill")
async def fill(http: HttpRequest, body: FillBody) -> Response:
    with client_errors():
        template = template_of(body, http.app.state.manager.names)
    n, words = body.n or None, body.words
    if template.models:
        found = await by_each(http, template, words, n)
    else:
        found = await by(http, body.model, template, words, n, True)
    sentences = [
        {"text": str(sentence), "model": sentence.model or body.model, "choices": list(sentence.choices)}
        for sentence in template.sentences
    ]
    numbers = {"words": found.words, "logprobs": found.logprobs}
    return await reply(http, {"sentences": sentences, **numbers, "note": METHODS[found.method]})


async def by(
    http: HttpRequest, name: str, template: Template, words: list[str] | None, n: int | None, rescore: bool
) -> Filled:
    found = await ask_in_turns(http, name, partial(turns, template, words, n, rescore))
    assert found is not None, "the last thing it yields"
    return found


async def by_each(http: HttpRequest, template: Template, words: list[str] | None, n: int | None) -> Filled:
    """What the models that a template names find."""
    steps = compare_models(template, words, n)
    ask = next(steps)
    while True:
        asked = None if ask.words is None else list(ask.words)
        part = await by(http, ask.model, template.of(ask.model), asked, None, ask.rescore is not False)
        with client_errors():
            try:
                ask = steps.send(part)
            except StopIteration as end:
                found: Filled = end.value
                return found


def turns(
    template: Template, words: list[str] | None, n: int | None, rescore: bool, desk: Desk
) -> Iterator[Filled | None]:
    """What `observe.fill.fill` finds, the last thing that is yielded. A causal model reads each candidate with what
    follows the blank, if it is to `rescore` and words follow, which takes its time: one sentence a turn."""
    desk.loaded.require("fill")
    model, tokenizer = desk.model, desk.tokenizer
    if tokenizer is None:
        raise ValueError(f"{desk.loaded.name} has no tokenizer, and reads no text")
    key = ("fill", template.sentences, tuple(words or ()), n, rescore)
    found: Filled | None = desk.kept(key)
    causal = isinstance(model, DecoderModel)
    rescore = rescore and causal and template.goes_on
    if found is None and (words is None or not causal):
        found = fill_in(model, tokenizer, template, words=words, n=n, rescore=False if causal else None)
        if rescore and len(found.words) <= RESCORED:
            words, found = found.words, None
            yield None
    if found is None:
        parts = []
        for sentence in template.sentences:
            one = Template(str(sentence), (), (sentence,))
            parts.append(fill_in(model, tokenizer, one, words=words, rescore=rescore))
            yield None
        logprobs = torch.cat([part.logprobs for part in parts])
        found = Filled(template, parts[0].words, logprobs, parts[0].method)
    desk.put(key, found)
    yield found


def template_of(body: FillBody, models: Collection[str]) -> Template:
    """The sentences that are meant, of one template or of several texts."""
    if (body.texts is None) == (body.template is None):
        raise ApiError(400, "give either texts or a template: sentences with _ where a word is missing")
    if body.template is not None:
        return parse_template(body.template, models.__contains__, models)
    sentences = tuple(sentence for text in body.texts or () for sentence in parse_template(text).sentences)
    if len(sentences) > MAX_SENTENCES:
        raise ValueError(f"these are {len(sentences)} sentences: at most {MAX_SENTENCES} can be compared")
    return Template("\n".join(body.texts or ()), (), sentences)


# --- in place of a token ----------------------------------------------------------------------------------------------


@router.post("/api/fill/token")
async def fill_token(http: HttpRequest, body: TokenBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: replace(desk, body.text, body.index)))


def replace(desk: Desk, text: str, index: int) -> dict[str, Any]:
    """The likeliest tokens in the place of one: of a masked model with all others around it, of a causal one after
    those before it. Special tokens are not among them."""
    desk.loaded.require("fill")
    model, tokenizer = desk.model, desk.tokenizer
    if tokenizer is None:
        raise ValueError(f"{desk.loaded.name} has no tokenizer, and reads no text")
    tokens = cut(desk, text)
    ids = [token["id"] for token in tokens]
    model.check_length(len(ids))
    if index >= len(ids):
        raise ValueError(f"there is no token {index}: this text has 0 to {len(ids) - 1}")
    if isinstance(model, DecoderModel):
        begin = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
        shown, place = ids[:index] or begin, max(index - 1, 0)
        if not shown:
            raise ValueError("nothing stands before this token, and this model has none to begin a text with")
    else:
        if tokens[index]["special"] or tokenizer.mask_id is None:
            raise ValueError(f"{tokens[index]['raw']} stands around every text: choose one of the text's own")
        shown, place = [*ids[:index], tokenizer.mask_id, *ids[index + 1 :]], index
    logits = model(Batch(torch.tensor([shown], device=model.device))).logits
    assert logits is not None, "the ability promises a head"
    chances = logits[0, place].float().softmax(dim=-1)
    special = set(tokenizer.special_tokens.values())
    best = chances.argsort(descending=True, stable=True)[: SHOWN + len(special)].tolist()
    chosen = [i for i in best if i not in special][:SHOWN]
    words = [{"word": desk.token(i)["text"], "probability": float(chances[i])} for i in chosen]
    return {"tokens": tokens, "words": words}
