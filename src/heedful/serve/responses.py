"""POST /v1/responses: OpenAI's Responses API, another form of a chat; GET and DELETE what is stored of them.

A response is kept, with the conversation before it, unless `store` is false (serve/response_store.py has the limits);
`previous_response_id` continues one. Where the API differs: nothing outlives the server, and `background`, reasoning
and OpenAI's own tools are refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from heedful.serve.chat import chat_response
from heedful.serve.chat_adapter import AnswerBlock, BlockFormatter, new_id, renamed_fields, server_sent
from heedful.serve.errors import MAX_ECHOED, ApiError
from heedful.serve.response_schema import json_or_event_stream
from heedful.serve.response_store import ResponseStore, StoredResponse
from heedful.serve.responses_schema import (
    FIELD_NAMES,
    DeletedResponse,
    InputItem,
    InputItemList,
    ResponseObject,
    ResponsesRequest,
)

router = APIRouter()
ITEM_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=json_or_event_stream("The response, or with `stream` its events (response.output_text.delta and others)"),
)
async def create_response(http: HttpRequest, body: ResponsesRequest) -> Response:
    """Answer a text or a conversation."""
    earlier = earlier_items(http, body.previous_response_id)
    items = json.dumps([*earlier, *map(listed_item, body.input)], ensure_ascii=False).encode()
    most = http.app.state.options.max_body
    if earlier and len(items) > most:
        message = f"the conversation has {len(items):,} bytes, and this server takes at most {most:,}: begin another"
        raise ApiError(400, message, param="previous_response_id")

    def keep(id: str, response: bytes) -> None:
        store_of(http).put(http.scope["state"]["key"], id, StoredResponse(response, items))

    with renamed_fields(FIELD_NAMES):
        chat = body.chat_request([*map(InputItem.model_validate, earlier), *body.input])
        return await chat_response(http, chat, partial(ResponsesFormatter, body, keep if body.store else None))


@router.get("/v1/responses/{id}", response_model=ResponseObject)
async def get_response(
    http: HttpRequest, id: str, include: Annotated[list[str] | None, Query()] = None, stream: bool = False
) -> Response:
    """A response that was stored."""
    for name, given in ("include", include), ("stream", stream):
        if given:
            raise ApiError(400, f"{name} is not implemented for stored responses: leave it out", param=name)
    return Response(find_response(http, id).response, media_type="application/json")


@router.delete("/v1/responses/{id}", response_model=DeletedResponse)
async def delete_response(http: HttpRequest, id: str) -> Response:
    """Forget a response that was stored."""
    find_response(http, id)
    store_of(http).delete(http.scope["state"]["key"], id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


@router.get("/v1/responses/{id}/input_items", response_model=InputItemList)
async def list_input_items(
    http: HttpRequest,
    id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items of the conversation that a stored response answers."""
    items = json.loads(find_response(http, id).items)
    items = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(400, "after is not the id of an item of this response", param="after")
        items = items[places[0] + 1 :]
    shown = items[:limit]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return JSONResponse({"object": "list", "data": shown, **ends, "has_more": len(items) > limit})


def store_of(http: HttpRequest) -> ResponseStore:
    """The responses that are stored."""
    found: ResponseStore = http.app.state.responses
    return found


def find_response(http: HttpRequest, id: str) -> StoredResponse:
    """A stored response; ApiError if there is none of this id for the request's API key."""
    found = store_of(http).get(http.scope["state"]["key"], id)
    if found is None:
        raise ApiError(404, f"Response with id '{id[:MAX_ECHOED]}' not found.")
    return found


def earlier_items(http: HttpRequest, id: str | None) -> list[dict[str, Any]]:
    """The conversation up to the end of a stored response; ApiError if it is not stored (any more)."""
    if id is None:
        return []
    found = store_of(http).get(http.scope["state"]["key"], id)
    if found is None:
        message = f"Previous response with id '{id[:MAX_ECHOED]}' not found."
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    earlier: list[dict[str, Any]] = json.loads(found.items)
    return earlier + json.loads(found.response)["output"]


def listed_item(item: InputItem) -> dict[str, Any]:
    """An item as it is stored and listed, with an id."""
    return item.listed(item.id or new_id(ITEM_PREFIXES[item.type]))


class ResponsesFormatter(BlockFormatter):
    """A response and its events; `keep` gets the id and the response at its end."""

    def __init__(self, body: ResponsesRequest, keep: Callable[[str, bytes], None] | None, *given: Any) -> None:
        super().__init__(*given)
        self.request, self.keep, self.id = body, keep, new_id("resp")
        self._item_ids: list[str] = []  # of the blocks
        self._n_events = 0

    # --- objects ----------------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The response at its end, which is kept."""
        incomplete = self.finish_reason == "length"
        if not self.blocks:
            self._next_block(AnswerBlock(0))  # a message without text
        found = self._response("incomplete" if incomplete else "completed")
        found |= {"usage": self.usage(), "completed_at": int(time.time())}
        if incomplete:
            found |= {"incomplete_details": {"reason": "max_output_tokens"}, "completed_at": None}
        if self.keep is not None:
            self.keep(self.id, json.dumps(found).encode())
        return found

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self.request, self.spec.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [self._item(block) for block in self.blocks],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store,
            "temperature": sampling.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice.listed,
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
            "top_p": sampling.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
            "metadata": body.metadata,
            **self.warnings(),
        }

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens, by their names here."""
        n_input, n_output = self.spec.n_prompt_tokens, self.n_generated
        return {
            "input_tokens": n_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": n_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_input + n_output,
        }

    def _item(self, block: AnswerBlock, status: str | None = None) -> dict[str, Any]:
        """An item of the output; only the last can be incomplete."""
        if status is None:
            cut = self.finish_reason in ("length", "error") and block is self.blocks[-1]
            status = "incomplete" if cut else "completed"
        found = {"id": self._item_ids[block.index], "status": status}
        if block.call_id is not None:
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**found, "type": "function_call", **call}
        content = [] if status == "in_progress" else [text_part(block.text)]
        return {**found, "type": "message", "role": "assistant", "content": content}

    # --- events -----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        self._n_events += 1
        return server_sent(f"response.{kind}", {"sequence_number": self._n_events - 1, **fields})

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        found: dict[str, Any] = {"item_id": self._item_ids[block.index], "output_index": block.index}
        return found if block.call_id is not None else {**found, "content_index": 0}

    def begin(self) -> str:
        """The events at the beginning of a stream."""
        response = {"response": self._response("in_progress")}
        return self._event("created", response) + self._event("in_progress", response)

    def begin_block(self, block: AnswerBlock) -> str:
        """A new item, and of a message its one part."""
        self._item_ids.append(new_id("msg" if block.call_id is None else "fc"))
        begun = self._event(
            "output_item.added", {"output_index": block.index, "item": self._item(block, "in_progress")}
        )
        if block.call_id is not None:
            return begun
        return begun + self._event("content_part.added", {**self._place(block), "part": text_part("")})

    def add(self, block: AnswerBlock, piece: str) -> str:
        """A piece of a text, or of a call's arguments."""
        if block.call_id is not None:
            return self._event("function_call_arguments.delta", {**self._place(block), "delta": piece})
        return self._event("output_text.delta", {**self._place(block), "delta": piece, "logprobs": []})

    def end_block(self, block: AnswerBlock) -> str:
        """The end of an item, with all of it."""
        place = self._place(block)
        if block.call_id is not None:
            whole = {**place, "name": block.name, "arguments": block.text}
            ended = self._event("function_call_arguments.done", whole)
        else:
            ended = self._event("output_text.done", {**place, "text": block.text, "logprobs": []})
            ended += self._event("content_part.done", {**place, "part": text_part(block.text)})
        return ended + self._event("output_item.done", {"output_index": block.index, "item": self._item(block)})

    def final_chunk(self) -> str:
        """The end of a stream, with the whole response."""
        empty = "" if self.blocks else self._next_block(AnswerBlock(0))
        ended, whole = super().final_chunk(), self.whole()
        return empty + ended + self._event(whole["status"], {"response": whole})

    def error_chunk(self, problem: ApiError) -> str:
        """The end of a stream that failed."""
        self.finish_reason = "error"
        error = {"code": "server_error", "message": problem.message}
        return self._event("failed", {"response": {**self._response("failed"), "error": error}})


def text_part(text: str) -> dict[str, Any]:
    """The part of a message that is its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
