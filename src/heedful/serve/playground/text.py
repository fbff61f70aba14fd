"""POST /api/tokens, /api/next, /api/lens: a text cut into tokens, what comes next, and what each layer would say."""

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
from heedful.serve.playground.desk import Desk, ask
from heedful.serve.playground.shapes import MOST_TOKENS, OfText, check_count, reply
from heedful.serve.request_schema import Count

router = APIRouter()
LONGEST_ANSWER = 128  # tokens that an encoder-decoder writes to be looked at


class NextBody(OfText):
    top_k: Annotated[Count, Field(ge=1, le=1000)] = 20


class LensBody(OfText):
    k: Annotated[Count, Field(ge=1, le=10)] = 5


@router.post("/api/tokens")
async def tokens(http: HttpRequest, body: OfText) -> Response:
    return await reply(http, {"tokens": await ask(http, body.model, lambda desk: cut(desk, body.text))})


@router.post("/api/next")
async def what_next(http: HttpRequest, body: NextBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: next_tokens(desk, body.text, body.top_k)))


@router.post("/api/lens")
async def lens(http: HttpRequest, body: LensBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: layers(desk, body.text, body.k)))


def cut(desk: Desk, text: str) -> list[dict[str, Any]]:
    """All tokens that the model would read, however many."""
    if isinstance(desk.model, ViT):
        raise ValueError(f"{desk.loaded.name} reads images, and no text")
    if desk.tokenizer is None:
        begin = [desk.model.start_id] if isinstance(desk.model, ImageGPT) else []
        return desk.tokens(begin + (token_ids(desk.model, None, text) if text.strip() else []))
    return desk.tokens(desk.tokenizer.encode(text, add_special=True))


def reading_of(
    desk: Desk, text: str, most: int | None = None, target: str | None = None, hidden: Hashable = ()
) -> ModelInput:
    """A text as the model reads it; an encoder-decoder writes its answer, once for each `hidden`: what of the source
    the caller hides meanwhile."""

    def make() -> ModelInput:
        check_count(desk, len(cut(desk, text)), most)
        found = text_input(desk.model, desk.tokenizer, text, target=target, max_tokens=LONGEST_ANSWER)
        check_count(desk, len(found.tokens), most)
        return found

    return desk.keep(("reading", text, target, hidden), make)


def sides(desk: Desk, reading: ModelInput) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The tokens of the source (none without an encoder beside a decoder), those read, and those said."""
    source = [] if reading.batch.source is None else desk.tokens(reading.batch.source[0].tolist())
    both = bool(source)
    return source, desk.tokens(reading.ids, target=both), desk.tokens(reading.target_ids, target=True)


def next_tokens(desk: Desk, text: str, k: int) -> dict[str, Any]:
    """The likeliest tokens after a text, or at the beginning of the answer to it."""
    desk.loaded.require("generate")
    model = desk.model
    assert isinstance(model, GenerativeModel)
    if isinstance(model, DecoderModel):
        batch = text_input(model, desk.tokenizer, text).batch
        logits = model.head(model.hidden(batch)[:, -1])[0]  # (V,)
        ids, writes = batch.ids[0].tolist(), False
    else:
        ids, writes = [token["id"] for token in cut(desk, text)], True
        check_count(desk, len(ids))
        if not ids:
            raise ValueError("the text is empty: write something to answer to")
        logits = model.start(Batch(source=torch.tensor([ids], device=model.device)))[0][0]
    best = logits.float().softmax(dim=-1).topk(min(k, len(logits)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    found = [{"token": desk.token(i, target=writes), "probability": p} for i, p in pairs]
    return {"tokens": desk.tokens(ids), "next": found}


def layers(desk: Desk, text: str, k: int) -> dict[str, Any]:
    """The likeliest tokens after every layer, at every position."""
    reading = reading_of(desk, text, MOST_TOKENS)
    found = logit_lens(desk.model, reading.batch, k)
    source, read_tokens, _ = sides(desk, reading)
    top = [
        [
            [{"token": desk.token(i, target=bool(source)), "probability": p} for i, p in zip(*pair, strict=True)]
            for pair in zip(ids, chances, strict=True)
        ]
        for ids, chances in zip(found.ids.tolist(), found.probabilities.tolist(), strict=True)
    ]
    return {"tokens": read_tokens, "layers": found.layers, "top": top}
