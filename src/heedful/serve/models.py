"""GET /v1/models and /v1/models/{id}: what is served. POST /tokenize, /detokenize, GET /tokenizer_info: its tokens.

The latter are vLLM's, by which lm-evaluation-harness finds a server's tokenizer. A special token is ordinary text in a
prompt, as everywhere; a prompt that is nothing but one is its id, which is how the harness asks for it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from heedful.loaded import Loaded
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.model_manager import ModelInfo
from heedful.serve.request_schema import Count, Flag, RequestBody, Text
from heedful.serve.response_schema import ModelCard, ModelList, ResponseModel
from heedful.text.tokenizer import Tokenizer

router = APIRouter()
LONG = 4096  # characters or tokens: of more, the event loop does not wait


@router.get("/v1/models", response_model=ModelList)
async def list_models(http: HttpRequest) -> dict[str, Any]:
    manager = http.app.state.manager
    return {"object": "list", "data": [card(manager.about(name)) for name in manager.names]}


@router.get("/v1/models/{id:path}", response_model=ModelCard)
async def retrieve_model(http: HttpRequest, id: str) -> dict[str, Any]:
    with client_errors():
        return card(http.app.state.manager.about(id))


def card(about: ModelInfo) -> dict[str, Any]:
    return {
        "id": about.id,
        "object": "model",
        "created": about.created,
        "owned_by": "heedful",
        "abilities": about.abilities,
        "loaded": about.loaded,
    }


# --- tokens ---------------------------------------------------------------------------------------------------------


class TokenizeRequest(RequestBody):
    prompt: Text
    model: Text | None = None
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class DetokenizeRequest(RequestBody):
    tokens: Annotated[list[Annotated[Count, Field(ge=0)]], Field(max_length=1_000_000)]
    model: Text | None = None


class Tokens(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None


class Detokenized(ResponseModel):
    prompt: str


class TokenizerInfo(ResponseModel):
    tokenizer_class: str
    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


@router.post("/tokenize", response_model=Tokens)
async def tokenize(http: HttpRequest, body: TokenizeRequest) -> Response:
    loaded, tokenizer = await of_model(http, body.model)

    def cut() -> Response:
        special = None if body.add_special_tokens else tokenizer.special_tokens.get(body.prompt)
        ids = tokenizer.encode(body.prompt, add_special=body.add_special_tokens) if special is None else [special]
        pieces = [tokenizer.token(id) for id in ids] if body.return_token_strs else None
        about = {"count": len(ids), "max_model_len": loaded.model.longest}
        return JSONResponse({"tokens": ids, **about, "token_strs": pieces})

    with client_errors("prompt"):
        return await asyncio.to_thread(cut) if len(body.prompt) > LONG else cut()


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(http: HttpRequest, body: DetokenizeRequest) -> Response:
    loaded, tokenizer = await of_model(http, body.model)
    size: int = loaded.model.config.vocab_size
    if (largest := max(body.tokens, default=0)) >= size:
        problem = f"token {largest} at {body.tokens.index(largest)}: the vocabulary of {loaded.name} is 0 to {size - 1}"
        raise ApiError(400, problem, param="tokens")

    def join() -> Response:
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    return await asyncio.to_thread(join) if len(body.tokens) > LONG else join()


@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(
    http: HttpRequest, model: Annotated[str | None, Query(max_length=1000)] = None
) -> dict[str, Any]:
    _, tokenizer = await of_model(http, model)
    special = {f"{role}_token": tokenizer.roles.get(role) for role in ("eos", "bos", "pad", "unk")}
    about = {"tokenizer_class": type(tokenizer.backend.model).__name__, "vocab_size": tokenizer.vocab_size}
    return {**about, **special, "chat_template": tokenizer.chat_template}


async def of_model(http: HttpRequest, name: str | None) -> tuple[Loaded, Tokenizer]:
    """A model and its tokenizer; the model may be evicted meanwhile, and both stay as they are."""
    with client_errors():
        loaded: Loaded = (await http.app.state.manager.worker(name)).loaded
    if loaded.tokenizer is None:
        raise ApiError(400, f"{loaded.name} has no tokenizer", param="model")
    return loaded, loaded.tokenizer
