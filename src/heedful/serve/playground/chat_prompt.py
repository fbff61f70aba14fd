"""POST /api/chat/prompt: a conversation as the model reads it, the text and tokens of its chat template."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.loaded import Loaded
from heedful.serve.errors import client_errors
from heedful.serve.field_types import MAX_PROMPTS, Flag
from heedful.serve.playground.inspection import run_on_model
from heedful.serve.playground.wire import ModelName, PlaygroundModel, Token, encode_response
from heedful.serve.request_schema import Message, RequestBody
from heedful.serve.tool_fields import Tools
from heedful.text.chat import strings_in
from heedful.text.limits import check_characters

router = APIRouter()


class ChatPromptRequest(RequestBody):
    """A conversation with its tools; its last message stays open where the model is to continue it."""

    model: ModelName
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_PROMPTS)]
    tools: Tools = Field(default_factory=list)
    continue_final_message: Flag = False


class ChatPromptResponse(PlaygroundModel):
    """What the chat template made of it."""

    text: str
    tokens: list[Token]
    context: int | None = Field(description="The most tokens that the model reads and writes; null: no limit")


@router.post("/api/chat/prompt", response_model=ChatPromptResponse)
async def post_chat_prompt(http: HttpRequest, body: ChatPromptRequest) -> Response:
    """The prompt that a chat template makes of a conversation, with the beginning of the model's next message."""
    with client_errors():
        worker = await http.app.state.manager.worker(body.model)
    with client_errors("messages"):
        async with worker.chat_encoders:  # a template is a program, of any speed: not on the event loop
            text, ids = await asyncio.to_thread(render, worker.loaded, body)
    tokens = await run_on_model(http, body.model, lambda inspector: inspector.tokens(ids))
    return await encode_response(http, {"text": text, "tokens": tokens, "context": worker.max_context})


def render(loaded: Loaded, body: ChatPromptRequest) -> tuple[str, list[int]]:
    """The text of a conversation and its token ids; ValueError for a model without a chat template."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, and no chat template")
    turns, open_end = [message.turn for message in body.messages], body.continue_final_message
    variables = {"tools": body.tools} if body.tools else {}
    check_characters(tokenizer, strings_in([turns, variables]), loaded.model.context_length)
    rendered = tokenizer.render_messages(turns, not open_end, open_end, **variables)
    return rendered.text, [id for id, _, _ in tokenizer.encode_rendered(rendered)[0]]
