"""POST /v1/embeddings: a vector for each text, the same that `Loaded.embed` gives.

Texts are tokenized as the model's files say, token ids taken as they are. Requests that wait at the same time share
batches (embedding_batches.py), which alternate with the steps of the engine, so that thousands of texts do not stall
the requests that are being generated.

    N texts, E model width, D of it that are asked for
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, cast
from weakref import WeakKeyDictionary

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.loaded import Loaded
from heedful.models.vocabulary import check_token_ids, vocab_sizes
from heedful.serve.embedding_batches import EmbeddingBatcher
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, client_errors
from heedful.serve.field_types import Prompts
from heedful.serve.handle import HandleGroup, client_of
from heedful.serve.request_schema import EmbeddingRequest
from heedful.serve.response_schema import EmbeddingResponse
from heedful.serve.worker import Worker
from heedful.tasks.embed import pooling_mode, tokenize_texts, truncation_length
from heedful.text.warn import collect_warnings

router = APIRouter()
FOREIGN_IDS = (
    "; token ids must be of this model's own tokenizer, and LangChain's OpenAIEmbeddings sends another one's unless it "
    "is given check_embedding_ctx_length=False"
)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def create_embeddings(http: HttpRequest, body: EmbeddingRequest) -> Response:
    """Embed one or several texts."""
    manager = http.app.state.manager
    async with AsyncExitStack() as resources:
        with client_errors():
            worker = await resources.enter_async_context(manager.acquire(body.model))
        return await embedding_response(http, body, worker, body.model or manager.names[0])


async def embedding_response(http: HttpRequest, body: EmbeddingRequest, worker: Worker, name: str) -> Response:
    """The response of a worker's model, which the client calls by this name."""
    loaded = worker.loaded
    check_embeds(loaded, body.dimensions)
    with collect_warnings() as told:
        rows = await asyncio.to_thread(encode_inputs, loaded, body.input)  # there may be thousands of texts
    with client_errors():
        group = HandleGroup([worker.run_job(batcher_of(worker).add(rows), client=client_of(http))])
    results = await group.results(http)
    if results is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    n_tokens = sum(map(len, rows))
    http.app.state.metrics.prompt_tokens.labels(loaded.name).inc(n_tokens)
    encoded = await asyncio.to_thread(response_body, body, name, results[0][-1], n_tokens, told)
    return Response(encoded, media_type="application/json")


_batchers: WeakKeyDictionary[Worker, EmbeddingBatcher] = WeakKeyDictionary()


def batcher_of(worker: Worker) -> EmbeddingBatcher:
    """The batcher of a worker's model."""
    if worker not in _batchers:
        _batchers[worker] = EmbeddingBatcher(worker.loaded)
    return _batchers[worker]


# --- inputs -----------------------------------------------------------------------------------------------------------


def check_embeds(loaded: Loaded, dimensions: int | None) -> None:
    """ApiError unless the model computes vectors of at least this width."""
    with client_errors("model"):
        loaded.require("embed")
        pooling_mode(loaded.model, loaded.pooling)
        if loaded.tokenizer is None:
            raise ValueError(f"{loaded.name} has no tokenizer: it cannot read texts")
    width = loaded.model.config.d_model
    if dimensions is not None and dimensions > width:
        raise ApiError(
            400, f"dimensions is {dimensions}: the vectors of {loaded.name} have {width}", param="dimensions"
        )


def encode_inputs(loaded: Loaded, given: Prompts) -> Sequence[Sequence[int]]:
    """The token ids of each text; ApiError for what the model cannot read."""
    assert loaded.tokenizer is not None
    truncation = truncation_length(loaded.model, loaded.pooling)
    items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if not isinstance(items[0], str):
        rows = cast("list[list[int]]", items)
        for i, row in enumerate(rows):
            try:
                check_token_ids(row, vocab_sizes(loaded.model)[0], f"text {i}", loaded.name)
            except ValueError as problem:
                raise ApiError(400, f"{problem}{FOREIGN_IDS}", param="input") from None
        check_lengths(loaded, rows, truncation or loaded.model.context_length, FOREIGN_IDS)
        return rows
    texts = cast("list[str]", items)
    with client_errors("input"):
        if "" in texts:
            raise ValueError(f"input has an empty text (at {texts.index('')}): leave it out")
        rows = tokenize_texts(loaded.tokenizer, texts, truncation, loaded.model.context_length, warn_if_cut=True)
    check_lengths(loaded, rows, loaded.model.context_length)
    return rows


def check_lengths(loaded: Loaded, rows: Sequence[Sequence[int]], most: int | None, hint: str = "") -> None:
    """ApiError for a text that is longer than the model reads."""
    for i, row in enumerate(rows):
        if most is not None and len(row) > most:
            problem = f"text {i} has {len(row)} tokens, and {loaded.name} reads at most {most}: shorten it{hint}"
            raise ApiError(400, problem, param="input", code="context_length_exceeded")


# --- response ---------------------------------------------------------------------------------------------------------


def response_body(
    body: EmbeddingRequest,
    name: str,
    vectors: Tensor,
    n_tokens: int,
    told: Sequence[str] = (),
) -> bytes:
    """The response as JSON; vectors (N, E)."""
    vectors = truncated(vectors, body.dimensions)  # (N, D)
    if not bool(vectors.isfinite().all()):
        raise ApiError(500, "the model computed a vector that is not finite", code="model_failed")
    found: list[Any]
    if body.encoding_format == "base64":
        found = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors.numpy().astype("<f4")]
    else:
        found = vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(found)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    warnings = {"warnings": told} if told else {}
    return json.dumps({"object": "list", "data": data, "model": name, "usage": usage, **warnings}).encode()


def truncated(vectors: Tensor, dimensions: int | None) -> Tensor:
    """The first D components of each vector (N, E), normalized to length 1 again: (N, D)."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    first = vectors[:, :dimensions]
    return first / first.norm(dim=-1, keepdim=True).clamp_(min=1e-12)
