"""POST /api/translate, /api/classify, /api/answer, /api/tag: what fine-tuned models do, as `heedful.load` has it."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.beam import beam_search
from heedful.models.base import GenerativeModel
from heedful.models.vit import ViT
from heedful.observe import attention as observed
from heedful.observe.inputs import ModelInput, text_input
from heedful.serve.field_types import Count
from heedful.serve.playground.attention_view import generated_text
from heedful.serve.playground.inspection import Inspector, run_on_model
from heedful.serve.playground.text import model_input, tokens_by_role, tokens_of
from heedful.serve.playground.wire import (
    ARRAYS_RESPONSE,
    MAX_TOKENS,
    FloatArray,
    LabelProbability,
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
from heedful.tasks.translate import sentence_end, split_end
from heedful.text.blank import is_blank

router = APIRouter()


class TranslateRequest(TextRequest):
    """A text to translate."""

    beams: Annotated[Count, Field(ge=1, le=16)] | None = None  # by default those of the model's authors


class ClassifyRequest(TextRequest):
    """A text to classify, or a pair of texts."""

    second: ShortText | None = None


class AnswerRequest(RequestBody):
    """A question, and the passage in which its answer is."""

    model: ModelName
    question: ShortText
    passage: ShortText


class TranslationResponse(TextResponse):
    """A translation, and the cross-attention of its tokens."""

    text: str
    source: list[Token]
    target: list[Token]
    weights: FloatArray | None = Field(description="(target, source): the mean of the last layer's heads")
    confidence: float | None = Field(
        description="The probability of a token on average, the geometric mean; null: not known"
    )


class ClassificationResponse(TextResponse):
    """The classes of a text or of a pair."""

    labels: list[LabelProbability]
    tokens: list[Token]


class AnswerInPassage(PlaygroundModel):
    """A part of the passage, by its characters."""

    text: str
    start: int
    end: int
    probability: float


class AnswersResponse(TextResponse):
    """The best answer, or none."""

    answers: list[AnswerInPassage]
    no_answer: float | None = Field(
        description="The probability that the passage has none; null: this model always answers"
    )


class TagInText(PlaygroundModel):
    """A part of the text with a label, by its characters."""

    text: str
    start: int
    end: int
    label: str
    probability: float


class TagsResponse(TextResponse):
    """The labelled parts of a text."""

    words: list[TagInText]


@router.post("/api/translate", response_model=TranslationResponse, responses=ARRAYS_RESPONSE)
async def post_translate(http: HttpRequest, body: TranslateRequest) -> Response:
    """A translation with its cross-attention."""
    found = await run_on_model(http, body.model, lambda i: translation(i, body.text, body.beams))
    return await encode_response(http, with_warnings(http, found))


@router.post("/api/classify", response_model=ClassificationResponse)
async def post_classify(http: HttpRequest, body: ClassifyRequest) -> Response:
    """The classes of a text, or of a pair of texts."""
    found = await run_on_model(http, body.model, lambda i: text_classification(i, body.text, body.second))
    return await encode_response(http, with_warnings(http, found))


@router.post("/api/answer", response_model=AnswersResponse)
async def post_answer(http: HttpRequest, body: AnswerRequest) -> Response:
    """The answer to a question in a passage."""
    found = await run_on_model(http, body.model, lambda i: extracted_answers(i, body.question, body.passage))
    return await encode_response(http, with_warnings(http, found))


@router.post("/api/tag", response_model=TagsResponse)
async def post_tag(http: HttpRequest, body: TextRequest) -> Response:
    """The labelled parts of a text, such as names."""
    found = await run_on_model(http, body.model, lambda i: tagged_spans(i, body.text))
    return await encode_response(http, with_warnings(http, found))


def translation(inspector: Inspector, text: str, beams: int | None) -> dict[str, Any]:
    """A TranslationResponse, cached."""
    inspector.loaded.require("translate")
    check_token_count(inspector, len(tokens_of(inspector, text)), MAX_TOKENS)
    if is_blank(text) and inspector.tokenizer is not None:  # as `Loaded.translate` has it
        return {"text": "", "source": tokens_of(inspector, text), "target": [], "weights": None, "confidence": None}
    return inspector.cached(("translation", text, beams), lambda: _translation(inspector, text, beams))


def _translation(inspector: Inspector, text: str, beams: int | None) -> dict[str, Any]:
    inputs, translated = with_translation(inspector, text, beams)
    source, _, generated = tokens_by_role(inspector, inputs)
    weights, confidence = None, token_probability(inspector, inputs)
    if "cross" in observed.attention_kinds(inspector.model):
        (last,) = observed.attention_weights(inspector.model, inputs, "cross", -1).values()
        weights = last.mean(dim=0)
    return {
        "text": translated, "source": source, "target": generated, "weights": weights,
        "confidence": confidence,
    }  # fmt: skip


def token_probability(inspector: Inspector, inputs: ModelInput) -> float | None:
    """How probable the tokens of the target are for the model itself: their geometric mean. A model that is asked for
    something that it was not trained for is unsure of every word that it writes."""
    ids = inputs.target_ids
    written = ids[:-1] if ids and ids[-1] in inspector.loaded.eos_ids else ids  # that a sentence ends is easily said
    if not written:
        return None
    targets = torch.tensor(written, device=inspector.model.device)
    logits = inspector.model(inputs.batch).logits[0, : len(targets)]  # (T, V)
    chosen = logits.float().log_softmax(dim=-1).gather(1, targets[:, None])
    return float(chosen.mean().exp())


def with_translation(inspector: Inspector, text: str, beams: int | None) -> tuple[ModelInput, str | None]:
    """A text with its translation as model input, and the translation. A model without a tokenizer generates as many
    ids as the source."""
    if inspector.tokenizer is not None:
        given: dict[str, Any] = {} if beams is None else {"beams": beams}
        choice = inspector.loaded.complete_translation([text], **given)[0].choices[0]
        eos = list(inspector.loaded.eos_ids[:1]) if choice.finish_reason == "stop" else []
        source, _ = split_end(text, sentence_end(inspector.model))
        return text_input(inspector.model, inspector.tokenizer, source, target=[*choice.tokens, *eos]), choice.text
    greedy = model_input(inspector, text, MAX_TOKENS)
    if beams is None or beams == 1:
        return greedy, generated_text(inspector, greedy)
    model = inspector.model
    assert isinstance(model, GenerativeModel)
    n = len(greedy.source)
    best = beam_search(model, type(greedy.batch)(source=greedy.batch.source), beams=beams, max_tokens=n)[0][0]
    inputs = text_input(model, None, text, target=best.tokens)
    return inputs, generated_text(inspector, inputs)


def text_classification(inspector: Inspector, text: str, second: str | None = None) -> dict[str, Any]:
    """A ClassificationResponse."""
    if isinstance(inspector.model, ViT):
        raise ValueError(f"{inspector.loaded.name} classifies images: see /api/image/classify")
    labels = [{"label": label.name, "probability": label.score} for label in inspector.loaded.classify(text, second)]
    if second is None or inspector.tokenizer is None:
        return {"labels": labels, "tokens": tokens_of(inspector, text)}
    return {"labels": labels, "tokens": inspector.tokens(inspector.tokenizer.encode_pair(text, second)[0])}


def extracted_answers(inspector: Inspector, question: str, passage: str) -> dict[str, Any]:
    """An AnswersResponse."""
    span = inspector.loaded.answer(question, passage)
    found = {"text": span.text, "start": span.begin, "end": span.end, "probability": span.score}
    return {"answers": [found] if span.text else [], "no_answer": span.no_answer}


def tagged_spans(inspector: Inspector, text: str) -> dict[str, Any]:
    """A TagsResponse."""
    words = [
        {"text": s.text, "start": s.begin, "end": s.end, "label": s.label, "probability": s.score}
        for s in inspector.loaded.tag(text)
    ]
    return {"words": words}
