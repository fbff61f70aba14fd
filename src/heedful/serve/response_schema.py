"""The shapes of the answers, for the OpenAPI schema at /openapi.json: routes build plain dicts of these shapes.

Nothing is checked against them on the way out, where every microsecond is the engine's; the tests do that.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None  # None in the chunks of a stream that goes on
    logprobs: CompletionLogprobs | None


class CompletionResponse(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatLogprob] | None


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None


class ChatResponse(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class EmbeddingItem(ResponseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # the text is little-endian float32 in base64


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(ResponseModel):
    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseModel):
    status: Literal["ok", "stopping"]


def json_or_event_stream(about: str) -> dict[int | str, dict[str, Any]]:
    """For routes that answer with JSON or a stream: `responses=streamed("...")` beside `response_model`.

    `itemSchema` is OpenAPI 3.2's word for the schema of each event; readers of 3.1 pass over it.
    """
    event = {
        "type": "object",
        "properties": {"data": {"type": "string", "description": "A chunk as JSON; the last is [DONE]"}},
        "required": ["data"],
    }
    return {200: {"description": about, "content": {"text/event-stream": {"itemSchema": event}}}}
