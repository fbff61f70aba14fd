"""POST /api/fill and /api/fill/token: word probabilities in the blank of several sentences, or in place of a token.

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
from heedful.models.cbow import CBOW
from heedful.observe.compare_models import compare_models
from heedful.observe.fill import METHODS, RESCORED, Filled, fill_template
from heedful.observe.template import MAX_SENTENCES, Template, parse_template
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.field_types import Count
from heedful.serve.playground.inspection import Inspector, run_in_slices, run_on_model
from heedful.serve.playground.text import tokens_of
from heedful.serve.playground.wire import (
    ARRAYS_RESPONSE,
    FloatArray,
    Index,
    ModelName,
    PlaygroundModel,
    ShortText,
    TextRequest,
    TextResponse,
    Token,
    check_token_count,
    encode_response,
    with_warnings,
)
from heedful.serve.request_schema import RequestBody
from heedful.text.tokenizer import Tokenizer

router = APIRouter()
MAX_ALTERNATIVES = 30  # in place of a token

Words = Annotated[list[ShortText], Field(min_length=1, max_length=RESCORED)]


class FillTemplateRequest(RequestBody):
    """Sentences or a template, with a blank `_` in each; words to compare, or how many of each sentence's best."""

    model: ModelName
    texts: Annotated[list[ShortText], Field(min_length=1, max_length=MAX_SENTENCES)] | None = None
    template: ShortText | None = None
    words: Words | None = None  # only these
    n: Annotated[Count, Field(ge=0)] = 30  # of each sentence; 0: all


class FillTokenRequest(TextRequest):
    """A text, and the index of the token to replace."""

    index: Index


class FilledSentence(PlaygroundModel):
    """A sentence of a template, the model that filled it, and the bracket options it was made of."""

    text: str
    model: str
    choices: list[str]


class FillResponse(TextResponse):
    """Log-probabilities of words in the blanks of several sentences."""

    sentences: list[FilledSentence]
    words: list[str]
    logprobs: FloatArray = Field(description="(sentences, words)")
    note: str | None = Field(description="How words of several tokens were scored")


class WordProbability(PlaygroundModel):
    """A word and its probability."""

    word: str
    probability: float


class OwnRank(PlaygroundModel):
    """The token that stands there itself: 1 is the likeliest of all that are not special."""

    rank: int
    probability: float


class FillTokenResponse(PlaygroundModel):
    """The most probable words in place of one token."""

    tokens: list[Token]
    words: list[WordProbability]
    own: OwnRank


@router.post("/api/fill", response_model=FillResponse, responses=ARRAYS_RESPONSE)
async def post_fill(http: HttpRequest, body: FillTemplateRequest) -> Response:
    """Word probabilities in the blanks of sentences."""
    with client_errors():
        template = requested_template(body, http.app.state.manager.names)
    n, words = body.n or None, body.words
    if template.models:
        found = await fill_by_served_models(http, template, words, n)
    else:
        found = await fill_by_model(http, body.model, template, words, n, True)
    sentences = [
        {"text": str(sentence), "model": sentence.model or body.model, "choices": list(sentence.choices)}
        for sentence in template.sentences
    ]
    numbers = {"words": found.words, "logprobs": found.logprobs}
    content = {"sentences": sentences, **numbers, "note": METHODS[found.method]}
    return await encode_response(http, with_warnings(http, content))


async def fill_by_model(
    http: HttpRequest, name: str, template: Template, words: list[str] | None, n: int | None, rescore: bool
) -> Filled:
    """A template filled by one served model."""
    found = await run_in_slices(http, name, partial(fill_in_slices, template, words, n, rescore))
    assert found is not None, "the last value it yields"
    return found


async def fill_by_served_models(
    http: HttpRequest, template: Template, words: list[str] | None, n: int | None
) -> Filled:
    """A template filled by each of the models that it names."""
    steps = compare_models(template, words, n)
    wanted = next(steps)
    while True:
        given = None if wanted.words is None else list(wanted.words)
        part = await fill_by_model(
            http, wanted.model, template.for_model(wanted.model), given, None, wanted.rescore is not False
        )
        with client_errors():
            try:
                wanted = steps.send(part)
            except StopIteration as end:
                found: Filled = end.value
                return found


def fill_in_slices(
    template: Template, words: list[str] | None, n: int | None, rescore: bool, inspector: Inspector
) -> Iterator[Filled | None]:
    """What `observe.fill.fill` returns, as the last value yielded.

    With `rescore` a causal model scores each candidate together with the text after the blank, which is slow: one
    sentence a slice.
    """
    inspector.loaded.require("fill")
    model, tokenizer = inspector.model, inspector.tokenizer
    if tokenizer is None:
        raise ValueError(f"{inspector.loaded.name} has no tokenizer, and reads no text")
    key = ("fill", template.sentences, tuple(words or ()), n, rescore)
    found: Filled | None = inspector.cache_get(key)
    causal = isinstance(model, DecoderModel)
    rescore = rescore and causal and template.has_text_after_blank
    if found is None:
        check_sentences(inspector, tokenizer, template, whole=not causal)
    if found is None and (words is None or not causal):
        found = fill_template(model, tokenizer, template, words=words, n=n, rescore=False if causal else None)
        if rescore and len(found.words) <= RESCORED:
            words, found = found.words, None
            yield None
    if found is None:
        check_sentences(inspector, tokenizer, template, whole=rescore)
        parts = []
        for sentence in template.sentences:
            one = Template(str(sentence), (), (sentence,))
            parts.append(fill_template(model, tokenizer, one, words=words, rescore=rescore))
            yield None
        logprobs = torch.cat([part.logprobs for part in parts])
        found = Filled(template, parts[0].words, logprobs, parts[0].method)
    inspector.cache_put(key, found)
    yield found


def check_sentences(inspector: Inspector, tokenizer: Tokenizer, template: Template, *, whole: bool) -> None:
    """TextTooLong for a sentence of more tokens than the model reads: up to its blank, or with it and what follows."""
    for sentence in template.sentences:
        n = len(tokenizer.encode(sentence.before.rstrip(), add_special=True))
        if whole:
            n += 1 + len(tokenizer.encode(sentence.after))
        check_token_count(inspector, n)


def requested_template(body: FillTemplateRequest, models: Collection[str]) -> Template:
    """The sentences of a request, from its template or its texts."""
    if (body.texts is None) == (body.template is None):
        raise ApiError(400, "give either texts or a template: sentences with _ where a word is missing")
    if body.template is not None:
        return parse_template(body.template, models.__contains__, models)
    sentences = tuple(sentence for text in body.texts or () for sentence in parse_template(text).sentences)
    if len(sentences) > MAX_SENTENCES:
        raise ValueError(f"these are {len(sentences)} sentences: at most {MAX_SENTENCES} can be compared")
    return Template("\n".join(body.texts or ()), (), sentences)


# --- in place of a token ----------------------------------------------------------------------------------------------


@router.post("/api/fill/token", response_model=FillTokenResponse)
async def post_fill_token(http: HttpRequest, body: FillTokenRequest) -> Response:
    """The most probable words in place of one token."""
    found = await run_on_model(http, body.model, lambda i: token_alternatives(i, body.text, body.index))
    return await encode_response(http, found)


def token_alternatives(inspector: Inspector, text: str, index: int) -> dict[str, Any]:
    """The most probable tokens in the place of one, special tokens left out: a masked language model sees all other
    tokens, a causal one those before it."""
    inspector.loaded.require("fill")
    model, tokenizer = inspector.model, inspector.tokenizer
    if tokenizer is None:
        raise ValueError(f"{inspector.loaded.name} has no tokenizer, and reads no text")
    tokens = tokens_of(inspector, text)
    ids = [token["id"] for token in tokens]
    check_token_count(inspector, len(ids))
    if index >= len(ids):
        raise ValueError(f"there is no token {index}: this text has 0 to {len(ids) - 1}")
    if isinstance(model, DecoderModel):
        start = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
        context, position = ids[:index] or start, max(index - 1, 0)
        if not context:
            raise ValueError("nothing stands before this token, and this model has none to begin a text with")
    else:
        mask = ids[index] if isinstance(model, CBOW) else tokenizer.mask_id  # CBOW does not read what it predicts
        if tokens[index]["special"] or mask is None:
            raise ValueError(f"{tokens[index]['raw']} stands around every text: choose one of the text's own")
        context, position = [*ids[:index], mask, *ids[index + 1 :]], index
    logits = model(Batch(torch.tensor([context], device=model.device))).logits
    assert logits is not None, "the ability promises a head"
    probabilities = logits[0, position].float().softmax(dim=-1)
    special = set(tokenizer.special_tokens.values())
    best = probabilities.argsort(descending=True, stable=True)[: MAX_ALTERNATIVES + len(special)].tolist()
    chosen = [i for i in best if i not in special][:MAX_ALTERNATIVES]
    words = [{"word": inspector.token(i)["text"], "probability": float(probabilities[i])} for i in chosen]
    likelier = probabilities > probabilities[ids[index]]
    likelier[sorted(special)] = False
    own = {"rank": 1 + int(likelier.sum()), "probability": float(probabilities[ids[index]])}
    return {"tokens": tokens, "words": words, "own": own}
