"""POST /tokenize and /detokenize, GET /tokenizer_info: a served model's tokenizer.

The paths are vLLM's; lm-evaluation-harness finds a server's tokenizer by them. A special token in a prompt is ordinary
text, as everywhere; a prompt that is nothing but a special token is its id, which is how the harness asks for it.

The harness asks below the address that it sends completions to, and names no model: where several are served, its
address is that of one of them, /v1/engines/{engine}/completions.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from heedful.loaded import Loaded
from heedful.models.vocabulary import check_token_ids, vocab_sizes
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.field_types import Count, Flag, Text
from heedful.serve.request_schema import RequestBody
from heedful.serve.response_schema import ResponseModel
from heedful.text.tokenizer import Tokenizer

router = APIRouter()
MAX_CHARACTERS = 1_000_000  # of a text: a few seconds
OF_ENGINE = "/v1/engines/{engine:path}/completions"
LONG = 4096  # characters or tokens: more are processed in a thread, beside the event loop


class TokenizeRequest(RequestBody):
    """A text to tokenize."""

    prompt: Text
    model: Text | None = None
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class DetokenizeRequest(RequestBody):
    """Token ids to decode."""

    tokens: Annotated[list[Annotated[Count, Field(ge=0)]], Field(max_length=1_000_000)]
    model: Text | None = None


class TokenizeResponse(ResponseModel):
    """The token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(ResponseModel):
    """A tokenizer's kind, size, special tokens and chat template."""

    tokenizer_class: str
    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


@router.post(OF_ENGINE + "/tokenize", response_model=TokenizeResponse, include_in_schema=False)
@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize_text(http: HttpRequest, body: TokenizeRequest) -> Response:
    """Tokenize a text."""
    loaded, tokenizer = await require_tokenizer(http, body.model)

    def encode() -> Response:
        special = None if body.add_special_tokens else tokenizer.special_tokens.get(body.prompt)
        ids = tokenizer.encode(body.prompt, add_special=body.add_special_tokens) if special is None else [special]
        pieces = [tokenizer.token(id) for id in ids] if body.return_token_strs else None
        about = {"count": len(ids), "max_model_len": loaded.model.context_length}
        return JSONResponse({"tokens": ids, **about, "token_strs": pieces})

    with client_errors("prompt"):
        if len(body.prompt) > MAX_CHARACTERS:
            n = len(body.prompt)
            raise ValueError(f"the text has {n:,} characters: at most {MAX_CHARACTERS:,} are tokenized, so send parts")
        return await asyncio.to_thread(encode) if len(body.prompt) > LONG else encode()


@router.post(OF_ENGINE + "/detokenize", response_model=DetokenizeResponse, include_in_schema=False)
@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize_ids(http: HttpRequest, body: DetokenizeRequest) -> Response:
    """Decode token ids."""
    loaded, tokenizer = await require_tokenizer(http, body.model)
    with client_errors("tokens"):
        check_token_ids(body.tokens, vocab_sizes(loaded.model)[0], "tokens", loaded.name)

    def decode() -> Response:
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    return await asyncio.to_thread(decode) if len(body.tokens) > LONG else decode()


@router.get(OF_ENGINE + "/tokenizer_info", response_model=TokenizerInfo, include_in_schema=False)
@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(
    http: HttpRequest, model: Annotated[str | None, Query(max_length=1000)] = None
) -> dict[str, Any]:
    """Describe a model's tokenizer."""
    _, tokenizer = await require_tokenizer(http, model)
    special = {f"{role}_token": tokenizer.roles.get(role) for role in ("eos", "bos", "pad", "unk")}
    about = {"tokenizer_class": type(tokenizer.backend.model).__name__, "vocab_size": tokenizer.vocab_size}
    return {**about, **special, "chat_template": tokenizer.chat_template}


async def require_tokenizer(http: HttpRequest, name: str | None) -> tuple[Loaded, Tokenizer]:
    """A model and its tokenizer, ApiError if it has none; a name in the path comes before that of the request. Both
    stay usable if the model is evicted meanwhile."""
    name = http.path_params.get("engine", name)
    with client_errors():
        loaded: Loaded = (await http.app.state.manager.worker(name)).loaded
    if loaded.tokenizer is None:
        raise ApiError(400, f"{loaded.name} has no tokenizer", param="model")
    return loaded, loaded.tokenizer
