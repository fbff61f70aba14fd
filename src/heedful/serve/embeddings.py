"""POST /v1/embeddings: a vector for each text, the same that `Loaded.embed` gives.

Texts are read as the model's files say, token ids as they are. Batches take turns with the steps of the engine, so that
nobody who is being answered waits for thousands of texts.

    N texts, E model width, D of it that are asked for
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import MutableMapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

import torch
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.loaded import Loaded
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, client_errors, execution_error, request_id
from heedful.serve.handle import JobHandle
from heedful.serve.request_schema import EmbeddingRequest, Prompts
from heedful.serve.response_schema import EmbeddingResponse
from heedful.serve.worker import Worker
from heedful.tasks.embed import embed_token_ids, pooling_mode, tokenize_texts, truncation_length

T = TypeVar("T")

router = APIRouter()
FOREIGN = (
    "; token ids must be of this model's own tokenizer, and LangChain's OpenAIEmbeddings sends another one's unless it "
    "is given check_embedding_ctx_length=False"
)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def embed(http: HttpRequest, body: EmbeddingRequest) -> Response:
    manager = http.app.state.manager
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(manager.acquire(body.model))
        return await answer(http, body, worker, body.model or manager.names[0])


async def answer(http: HttpRequest, body: EmbeddingRequest, worker: Worker, name: str) -> Response:
    loaded = worker.loaded
    check(loaded, body.dimensions)
    rows = await asyncio.to_thread(read, loaded, body.input)  # thousands of texts take their time
    with client_errors():
        work = worker.run(embed_token_ids(loaded.model, rows, loaded.pooling))
    try:
        batches = await unless_gone(http, work)
    except Exception as error:
        raise execution_error(error, request_id(http.scope)) from None
    if batches is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    n_tokens = sum(map(len, rows))
    http.app.state.metrics.prompt_tokens.labels(loaded.name).inc(n_tokens)
    encoded = await asyncio.to_thread(encode, body, name, batches, n_tokens)
    return Response(encoded, media_type="application/json")


async def unless_gone(http: HttpRequest, work: JobHandle[T]) -> list[T] | None:
    """Wait for the work, and for the client to go away: then nothing."""

    async def leaves() -> None:
        message: MutableMapping[str, Any] = {}
        while message.get("type") != "http.disconnect":
            message = await http.receive()

    result, left = asyncio.ensure_future(work.result()), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait((result, left), return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        work.cancel()
        result.cancel()
        left.cancel()


# --- what is asked --------------------------------------------------------------------------------------------------


def check(loaded: Loaded, dimensions: int | None) -> None:
    """ApiError unless the model gives vectors of this width."""
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


def read(loaded: Loaded, given: Prompts) -> Sequence[Sequence[int]]:
    """The token ids of each text, checked."""
    assert loaded.tokenizer is not None
    most = truncation_length(loaded.model, loaded.pooling)  # texts are cut there, if anywhere
    items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if not isinstance(items[0], str):
        rows = cast("list[list[int]]", items)
        check_ids(loaded, rows)
        check_lengths(loaded, rows, most or loaded.model.longest, FOREIGN)
        return rows
    texts = cast("list[str]", items)
    with client_errors("input"):
        if "" in texts:
            place = texts.index("")
            raise ValueError(f"input has an empty text (at {place}): leave it out")
        rows = tokenize_texts(loaded.tokenizer, texts, most)
    check_lengths(loaded, rows, loaded.model.longest)
    return rows


def check_ids(loaded: Loaded, rows: Sequence[Sequence[int]]) -> None:
    size: int = loaded.model.config.vocab_size
    for number, row in enumerate(rows):
        for place, id in enumerate(row):
            if not 0 <= id < size:
                where = f"token {id} (at {place} of text {number})"
                raise ApiError(
                    400,
                    f"{where}: the vocabulary of {loaded.name} is 0 to {size - 1}{FOREIGN}",
                    param="input",
                )


def check_lengths(loaded: Loaded, rows: Sequence[Sequence[int]], most: int | None, hint: str = "") -> None:
    for number, row in enumerate(rows):
        if most is not None and len(row) > most:
            problem = f"text {number} has {len(row)} tokens, and {loaded.name} reads at most {most}: shorten it{hint}"
            raise ApiError(400, problem, param="input", code="context_length_exceeded")


# --- what is answered -----------------------------------------------------------------------------------------------


def encode(body: EmbeddingRequest, name: str, batches: Sequence[tuple[list[int], Tensor]], n_tokens: int) -> bytes:
    """The response in JSON, in the order of the texts."""
    places = [place for batch, _ in batches for place in batch]
    vectors = torch.cat([found for _, found in batches]).cpu()  # (N, E), in the order they were read
    vectors = shortened(vectors[torch.tensor(places).argsort()], body.dimensions)  # (N, D)
    if not bool(vectors.isfinite().all()):
        raise ApiError(500, "the model computed a vector that is not finite", code="model_failed")
    found: list[Any]
    if body.encoding_format == "base64":
        found = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors.numpy().astype("<f4")]
    else:
        found = vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(found)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return json.dumps({"object": "list", "data": data, "model": name, "usage": usage}).encode()


def shortened(vectors: Tensor, dimensions: int | None) -> Tensor:
    """The first D numbers of each, scaled to length 1 again."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    first = vectors[:, :dimensions]
    return first / first.norm(dim=-1, keepdim=True).clamp_(min=1e-12)
