"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, another form of a chat.

Errors on these paths have Anthropic's form (serve/errors.py). Where the API differs: thinking, documents, images and
Anthropic's own tools are refused.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from heedful.serve.chat import chat_response, encode_chat
from heedful.serve.chat_adapter import AnswerBlock, BlockFormatter, new_id, renamed_fields, server_sent
from heedful.serve.errors import ANTHROPIC_PATHS, DESCRIPTIONS, ApiError, client_errors
from heedful.serve.messages_schema import (
    FIELD_NAMES,
    AnthropicError,
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from heedful.serve.response_schema import json_or_event_stream
from heedful.text.parse import parse_json

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError, "description": about} for status, about in DESCRIPTIONS.items()
}
router = APIRouter(responses=ERRORS)
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@router.post(
    "/v1/messages",
    response_model=MessageObject,
    responses=json_or_event_stream("The message, or with `stream` its events (content_block_delta and others)"),
)
async def create_message(http: HttpRequest, body: MessagesRequest) -> Response:
    """Generate the next message of a conversation."""
    with renamed_fields(FIELD_NAMES):
        return await chat_response(http, body.chat, MessagesFormatter)


@router.post("/v1/messages/count_tokens", response_model=TokenCount)
async def count_message_tokens(http: HttpRequest, body: CountTokensRequest) -> Response:
    """Count the tokens of a conversation."""
    with renamed_fields(FIELD_NAMES):
        chat = body.chat_request({})
        with client_errors():
            worker = await http.app.state.manager.worker(body.model)
        (prompt, source), _ = await encode_chat(chat, worker)
    return JSONResponse({"input_tokens": len(prompt) + len(source or ())})


class MessagesFormatter(BlockFormatter):
    """A message and its events."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.id = new_id("msg")

    # --- objects ----------------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The message."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [content_block(block) for block in self.blocks],
            **self._end(),
            "usage": self.usage(),
            **self.warnings(),
        }

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens, by their names here."""
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": self.spec.n_prompt_tokens, "output_tokens": self.n_generated, **cached}

    def _end(self) -> dict[str, str | None]:
        """Why the message ended; null where it has not."""
        reason: str | None = "end_turn" if self.stop_sequence is None else "stop_sequence"
        if self.finish_reason != "stop":
            reason = STOP_REASONS.get(self.finish_reason or "")
        return {"stop_reason": reason, "stop_sequence": self.stop_sequence}

    # --- events -----------------------------------------------------------------------------------------------------

    def begin(self) -> str:
        """The event at the beginning of a stream: the message without content."""
        return server_sent("message_start", {"message": self.whole()})

    def begin_block(self, block: AnswerBlock) -> str:
        """A new block, still empty."""
        return server_sent("content_block_start", {"index": block.index, "content_block": content_block(block)})

    def add(self, block: AnswerBlock, piece: str) -> str:
        """A piece of a text, or of a call's input as JSON."""
        delta = {"type": "text_delta", "text": piece}
        if block.call_id is not None:
            delta = {"type": "input_json_delta", "partial_json": piece}
        return server_sent("content_block_delta", {"index": block.index, "delta": delta})

    def end_block(self, block: AnswerBlock) -> str:
        """The end of a block."""
        return server_sent("content_block_stop", {"index": block.index})

    def final_chunk(self) -> str:
        """The end of a stream: why it ended, and the usage."""
        delta = server_sent("message_delta", {"delta": self._end(), "usage": self.usage()})
        return super().final_chunk() + delta + server_sent("message_stop", {})

    def error_chunk(self, problem: ApiError) -> str:
        """The end of a stream that failed."""
        return server_sent("error", problem.body(ANTHROPIC_PATHS))


def content_block(block: AnswerBlock) -> dict[str, Any]:
    """A block of a message; of a call whose arguments were cut, the input is empty."""
    if block.call_id is None:
        return {"type": "text", "text": block.text, "citations": None}
    try:
        given = parse_json(block.text)
    except ValueError:
        given = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}
