"""POST /api/tokens, /api/next, /api/lens: the tokens of a text, next-token probabilities, and the logit lens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.models.base import Batch, DecoderModel, GenerativeModel
from heedful.models.image_gpt import ImageGPT
from heedful.models.vit import ViT
from heedful.observe.inputs import ModelInput, text_input, token_ids
from heedful.observe.lens import logit_lens
from heedful.serve.field_types import Count
from heedful.serve.playground.inspection import Inspector, run_on_model
from heedful.serve.playground.wire import (
    MAX_TOKENS,
    PlaygroundModel,
    PromptRequest,
    TextRequest,
    Token,
    TokenProbability,
    check_token_count,
    encode_response,
)

router = APIRouter()
MAX_ANSWER_TOKENS = 128  # that an encoder-decoder generates to be inspected


class NextRequest(TextRequest):
    """A text, and how many tokens to list."""

    top_k: Annotated[Count, Field(ge=1, le=1000)] = 20


class LensRequest(TextRequest):
    """A text, and how many tokens to list for each layer and position."""

    k: Annotated[Count, Field(ge=1, le=10)] = 5


class TokensResponse(PlaygroundModel):
    """The tokens that the model reads."""

    tokens: list[Token]


class NextResponse(PlaygroundModel):
    """The tokens of the text, and the most probable next ones."""

    tokens: list[Token]
    next: list[TokenProbability]


class LensResponse(PlaygroundModel):
    """The most probable tokens by layer and position."""

    tokens: list[Token]
    layers: list[str]
    top: list[list[list[TokenProbability]]]


@router.post("/api/tokens", response_model=TokensResponse)
async def post_tokens(http: HttpRequest, body: PromptRequest) -> Response:
    """The tokens that a model reads for a text."""
    tokens = await run_on_model(http, body.model, lambda i: tokens_of(i, body.text, body.rendered))
    return await encode_response(http, {"tokens": tokens})


@router.post("/api/next", response_model=NextResponse)
async def post_next(http: HttpRequest, body: NextRequest) -> Response:
    """The most probable next tokens after a text."""
    found = await run_on_model(
        http, body.model, lambda inspector: next_token_probabilities(inspector, body.text, body.top_k)
    )
    return await encode_response(http, found)


@router.post("/api/lens", response_model=LensResponse)
async def post_lens(http: HttpRequest, body: LensRequest) -> Response:
    """The logit lens: the most probable tokens after every layer, at every position."""
    found = await run_on_model(http, body.model, lambda inspector: lens_by_layer(inspector, body.text, body.k))
    return await encode_response(http, found)


def tokens_of(inspector: Inspector, text: str, rendered: bool = False) -> list[dict[str, Any]]:
    """All tokens that the model would read, however many; `rendered`: see PromptRequest."""
    if isinstance(inspector.model, ViT):
        raise ValueError(f"{inspector.loaded.name} reads images, and no text")
    if inspector.tokenizer is None:
        start = [inspector.model.start_id] if isinstance(inspector.model, ImageGPT) else []
        return inspector.tokens(start + (token_ids(inspector.model, None, text) if text.strip() else []))
    return inspector.tokens(inspector.tokenizer.encode(text, add_special=not rendered, allow_special=rendered))


def model_input(
    inspector: Inspector,
    text: str,
    most: int | None = None,
    target: str | None = None,
    masked: Hashable = (),
    rendered: bool = False,
) -> ModelInput:
    """A text as the model's input, of at most `most` tokens. Without a `target` an encoder-decoder generates its own.

    `masked` is part of the cache's key: which source tokens the caller hides during generation.
    """

    def compute() -> ModelInput:
        check_token_count(inspector, len(tokens_of(inspector, text, rendered)), most)
        tokenizer = inspector.tokenizer
        if rendered and tokenizer is not None:
            tokenizer = tokenizer.reading_special()
        found = text_input(
            inspector.model, tokenizer, text, target=target, max_tokens=MAX_ANSWER_TOKENS, add_special=not rendered
        )
        check_token_count(inspector, len(found.tokens), most)
        return found

    return inspector.cached(("input", text, target, masked, rendered), compute)


def tokens_by_role(
    inspector: Inspector, inputs: ModelInput
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The source tokens (of an encoder-decoder), the tokens read by the model or its decoder, those it generated."""
    source = [] if inputs.batch.source is None else inspector.tokens(inputs.batch.source[0].tolist())
    own = inspector.tokens(inputs.ids, target=bool(source))
    return source, own, inspector.tokens(inputs.target_ids, target=True)


def next_token_probabilities(inspector: Inspector, text: str, k: int) -> dict[str, Any]:
    """The `k` most probable tokens after a text; of an encoder-decoder, the first ones of its output."""
    inspector.loaded.require("generate")
    model = inspector.model
    assert isinstance(model, GenerativeModel)
    if isinstance(model, DecoderModel):
        batch = text_input(model, inspector.tokenizer, text).batch
        logits = model.head(model.hidden(batch)[:, -1])[0]  # (V,)
        ids, target = batch.ids[0].tolist(), False
    else:
        ids, target = [token["id"] for token in tokens_of(inspector, text)], True
        check_token_count(inspector, len(ids))
        if not ids:
            raise ValueError("the text is empty: write something to answer to")
        logits = model.start(Batch(source=torch.tensor([ids], device=model.device)))[0][0]
    best = logits.float().softmax(dim=-1).topk(min(k, len(logits)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    found = [{"token": inspector.token(i, target=target), "probability": p} for i, p in pairs]
    return {"tokens": inspector.tokens(ids), "next": found}


def lens_by_layer(inspector: Inspector, text: str, k: int) -> dict[str, Any]:
    """The `k` most probable tokens after every layer, at every position."""
    inputs = model_input(inspector, text, MAX_TOKENS)
    found = logit_lens(inspector.model, inputs.batch, k)
    source, own, _ = tokens_by_role(inspector, inputs)
    top = [
        [
            [{"token": inspector.token(i, target=bool(source)), "probability": p} for i, p in zip(*pair, strict=True)]
            for pair in zip(ids, probabilities, strict=True)
        ]
        for ids, probabilities in zip(found.ids.tolist(), found.probabilities.tolist(), strict=True)
    ]
    return {"tokens": own, "layers": found.layers, "top": top}
