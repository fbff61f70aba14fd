"""The responses of OpenAI's API as pydantic models, for the schema at /openapi.json.

Routes build plain dicts: responses are not validated at run time, for speed; the tests validate them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """A JSON object of a response."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every error."""

    error: ErrorDetail


class Usage(ResponseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of a completion, as parallel lists over its tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One completion."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None  # None in the chunks of a stream that goes on
    logprobs: CompletionLogprobs | None


class CompletionResponse(ResponseModel):
    """The response of /v1/completions, and a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    warnings: list[str] | None = None  # where there is something; OpenAI's API has no such field


class CalledFunction(ResponseModel):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(ResponseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseModel):
    """The message that was generated."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[MessageToolCall] | None = None


class TopLogprob(ResponseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the message, with the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a message."""

    content: list[ChatLogprob] | None


class ChatChoice(ResponseModel):
    """One answer to the conversation."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class ChatResponse(ResponseModel):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    warnings: list[str] | None = None


class EmbeddingItem(ResponseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # the text is little-endian float32 in base64


class EmbeddingUsage(ResponseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(ResponseModel):
    """The response of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage
    warnings: list[str] | None = None


class ModelCard(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    abilities: list[str]
    context_length: int | None
    max_model_len: int | None
    loaded: bool


class ModelList(ResponseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseModel):
    """The response of /health."""

    status: Literal["ok", "stopping"]


def json_or_event_stream(about: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that returns JSON or, with `stream`, server-sent events.

    The schema of a stream is that of each event: OpenAPI 3.2 has `itemSchema` for that, which 3.1 does not allow.
    """
    event = {
        "type": "object",
        "properties": {"data": {"type": "string", "description": "A chunk as JSON; the last is [DONE]"}},
        "required": ["data"],
    }
    return {200: {"description": about, "content": {"text/event-stream": {"schema": event}}}}
