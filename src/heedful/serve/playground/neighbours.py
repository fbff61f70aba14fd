"""POST /api/neighbours: nearest words and analogies among a model's embeddings, as `Loaded.neighbours` gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.serve.field_types import Count
from heedful.serve.playground.inspection import Inspector, run_in_slices
from heedful.serve.playground.wire import (
    Index,
    PlaygroundModel,
    TextRequest,
    TextResponse,
    encode_response,
    with_warnings,
)
from heedful.tasks.neighbours import WordVectors, parse_expression, word_matrix_in_slices

router = APIRouter()


class NeighboursRequest(TextRequest):
    """A word, or words that are added and subtracted: "king - man + woman", "man:king::woman:?"."""

    n: Annotated[Count, Field(ge=1, le=1000)] = 10
    layer: Index | None = Field(None, description="Of this layer's outputs; null: of the input embedding")


class WordSimilarity(PlaygroundModel):
    """A word, and the cosine of its vector with the one asked for."""

    word: str
    similarity: float


class NeighboursResponse(TextResponse):
    """The nearest words, nearest first."""

    neighbours: list[WordSimilarity]


@router.post("/api/neighbours", response_model=NeighboursResponse)
async def post_neighbours(http: HttpRequest, body: NeighboursRequest) -> Response:
    """The words nearest to a word, or to what an expression of words comes to."""
    found = await run_in_slices(http, body.model, lambda inspector: neighbours_in_slices(inspector, body))
    return await encode_response(http, with_warnings(http, found))


def neighbours_in_slices(inspector: Inspector, body: NeighboursRequest) -> Iterator[dict[str, Any]]:
    """A NeighboursResponse, after something empty for each batch of words that the model has read."""
    inspector.loaded.require("neighbours")
    tokenizer = inspector.tokenizer
    if tokenizer is None:
        raise ValueError(f"{inspector.loaded.name} has no tokenizer, and reads no text")
    parse_expression(body.text)  # before words are embedded
    key = ("word vectors", body.layer)
    matrix: Tensor | None = inspector.cache_get(key)
    if matrix is None:
        for part in word_matrix_in_slices(inspector.model, tokenizer, body.layer):
            matrix = part
            yield {}
        assert matrix is not None
        inspector.cache_put(key, matrix)
    found = WordVectors(inspector.model, tokenizer, body.layer, matrix).nearest(body.text, body.n)
    yield {"neighbours": [{"word": x.word, "similarity": x.similarity} for x in found]}
