"""POST /api/translate, /api/classify, /api/answer, /api/tag: what fine-tuned models do, as `heedful.load` gives it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.beam import beam_search
from heedful.models.base import GenerativeModel
from heedful.models.vit import ViT
from heedful.observe import attention as look
from heedful.observe.inputs import ModelInput, text_input
from heedful.serve.playground.attention import answer_of
from heedful.serve.playground.desk import Desk, ask
from heedful.serve.playground.shapes import MOST_TOKENS, Name, OfText, Passage, check_count, reply
from heedful.serve.playground.text import LONGEST_ANSWER, cut, reading_of, sides
from heedful.serve.request_schema import Count, RequestBody

router = APIRouter()


class TranslateBody(OfText):
    beams: Annotated[Count, Field(ge=1, le=16)] | None = None  # as the model's authors do


class AnswerBody(RequestBody):
    model: Name
    question: Passage
    passage: Passage


@router.post("/api/translate")
async def translate(http: HttpRequest, body: TranslateBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: translated(desk, body.text, body.beams)))


@router.post("/api/classify")
async def classify(http: HttpRequest, body: OfText) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: labels(desk, body.text)))


@router.post("/api/answer")
async def answer(http: HttpRequest, body: AnswerBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: answers(desk, body.question, body.passage)))


@router.post("/api/tag")
async def tag(http: HttpRequest, body: OfText) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: tagged(desk, body.text)))


def translated(desk: Desk, text: str, beams: int | None) -> dict[str, Any]:
    """The translation, and where its tokens looked: the mean of the last layer's heads (target, source)."""
    desk.loaded.require("translate")
    n = len(cut(desk, text))
    check_count(desk, n, MOST_TOKENS)
    if not text.strip():
        raise ValueError("the text is empty: write something to translate")
    return desk.keep(("translation", text, beams), lambda: _translated(desk, text, beams))


def _translated(desk: Desk, text: str, beams: int | None) -> dict[str, Any]:
    reading = write(desk, text, beams)
    source, _, said = sides(desk, reading)
    weights = None
    if "cross" in look.attention_kinds(desk.model):
        (last,) = look.attention_weights(desk.model, reading, "cross", -1).values()
        weights = last.mean(dim=0)
    return {"text": answer_of(desk, reading), "source": source, "target": said, "weights": weights}


def write(desk: Desk, text: str, beams: int | None) -> ModelInput:
    """A text with its translation; of a model without a tokenizer as many numbers as there are."""
    if desk.tokenizer is not None:
        given: dict[str, Any] = {} if beams is None else {"beams": beams}
        settings = desk.loaded.translation_options(**given)
        settings["max_tokens"] = min(settings.get("max_tokens", LONGEST_ANSWER), LONGEST_ANSWER)
        choice = desk.loaded.complete(text, **settings)[0].choices[0]
        ended = list(desk.loaded.eos_ids[:1]) if choice.finish_reason == "stop" else []
        return text_input(desk.model, desk.tokenizer, text, target=[*choice.tokens, *ended])
    greedy = reading_of(desk, text, MOST_TOKENS)
    if beams is None or beams == 1:
        return greedy
    model = desk.model
    assert isinstance(model, GenerativeModel)
    n = len(greedy.source)
    best = beam_search(model, type(greedy.batch)(source=greedy.batch.source), beams=beams, max_tokens=n)[0][0]
    return text_input(model, None, text, target=best.tokens)


def labels(desk: Desk, text: str) -> dict[str, Any]:
    if isinstance(desk.model, ViT):
        raise ValueError(f"{desk.loaded.name} classifies images: see /api/image/classify")
    found = desk.loaded.classify(text)
    told = [{"label": label.name, "probability": label.score} for label in found]
    return {"labels": told, "tokens": cut(desk, text)}


def answers(desk: Desk, question: str, passage: str) -> dict[str, Any]:
    """The best answer; none where the model finds none."""
    span = desk.loaded.answer(question, passage)
    if not span.text:
        return {"answers": []}
    found = {"text": span.text, "start": span.begin, "end": span.end, "probability": span.score}
    return {"answers": [found]}


def tagged(desk: Desk, text: str) -> dict[str, Any]:
    words = [
        {"text": s.text, "start": s.begin, "end": s.end, "label": s.label, "probability": s.score}
        for s in desk.loaded.tag(text)
    ]
    return {"words": words}
