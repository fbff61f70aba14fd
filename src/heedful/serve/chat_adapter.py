"""What the APIs share that are other forms of a chat (serve/responses.py, serve/messages.py): their bodies become a
ChatRequest, and the message that answers it a list of blocks, each a text or a call of a tool."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError

from heedful.generate.request import Result
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.serve.chat import ChatFormatter
from heedful.serve.errors import ApiError, from_validation
from heedful.serve.field_types import check_nesting
from heedful.serve.generation import GenerationSpec, SubRequest
from heedful.serve.request_schema import ChatRequest, SamplingRequest
from heedful.serve.tool_fields import MAX_SCHEMA_NESTING

JsonObject = Annotated[dict[str, Any], AfterValidator(lambda value: check_nesting(value, MAX_SCHEMA_NESTING))]


def to_chat_request(body: SamplingRequest, fields: Mapping[str, Any]) -> ChatRequest:
    """The ChatRequest with the sampling of another body and these fields; ApiError if it is not valid."""
    names = set(SamplingRequest.model_fields)  # as JSON again, without warnings that it is not what it was parsed to
    sampling = body.model_dump(mode="json", include=names, exclude_unset=True, warnings=False)
    try:
        return ChatRequest.model_validate({**sampling, **fields})
    except ValidationError as problem:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in problem.errors()]
        raise from_validation(errors) from None


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields of a ChatRequest name those of another API instead."""
    try:
        yield
    except ApiError as error:
        given = error.param or ""
        first = given.partition(".")[0]
        error.param = names.get(first, given.replace(".function", "")) or None  # functions are flat here
        error.message = error.message.replace(given, error.param or "")
        raise


def new_id(prefix: str) -> str:
    """An id as these APIs write them."""
    return f"{prefix}_{secrets.token_hex(16)}"


def server_sent(kind: str, fields: Mapping[str, Any]) -> str:
    """A server-sent event whose name is also the type in its data."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, allow_nan=False)}\n\n"


@dataclass
class AnswerBlock:
    """A part of an answer: a text, or a call of a tool."""

    index: int
    text: str = ""  # of a call, its arguments as JSON
    name: str = ""  # of the tool that is called
    call_id: str | None = None  # None: not a call


class BlockFormatter(ChatFormatter):
    """Responses whose answer is a list of blocks, one after another; a stream begins and ends each of them."""

    def __init__(self, spec: GenerationSpec, loaded: Loaded, model: str, include_usage: bool) -> None:
        super().__init__(spec, loaded, model, include_usage)
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None

    # --- of an API --------------------------------------------------------------------------------------------------

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response with all blocks."""

    @abstractmethod
    def begin(self) -> str:
        """The events at the beginning of a stream."""

    @abstractmethod
    def begin_block(self, block: AnswerBlock) -> str:
        """The events at the beginning of a block."""

    @abstractmethod
    def add(self, block: AnswerBlock, piece: str) -> str:
        """The event of a piece that was added to a block."""

    @abstractmethod
    def end_block(self, block: AnswerBlock) -> str:
        """The events at the end of a block."""

    # --- of all -----------------------------------------------------------------------------------------------------

    def body(self, subrequests: Sequence[SubRequest], results: Sequence[Result]) -> bytes:
        """The full response as JSON."""
        (sub,), (result,) = subrequests, results
        (choice,) = result.choices
        self.n_generated = len(choice.tokens)
        answer = self.choice(sub, choice, result)
        for _ in self._added(answer["message"]):
            pass  # no stream
        self.finish_reason, self.stop_sequence = answer["finish_reason"], choice.stop_sequence
        return json.dumps(self.whole(), allow_nan=False).encode()

    def chunk(self, sub: SubRequest, event: Event) -> str:
        """The server-sent events for one event of the engine; may be empty."""
        state, chunks = self.choice_state(sub, event.index), list[str]()
        for delta in self.deltas(state, event):
            if "role" in delta.fields:
                chunks.append(self.begin())
            chunks += self._added(delta.fields)
            self.finish_reason = delta.finish or self.finish_reason
        if event.result is not None:
            self.stop_sequence = event.result.choices[0].stop_sequence
        return "".join(chunks)

    def final_chunk(self) -> str:
        """The end of a stream."""
        return self.end_block(self.blocks[-1]) if self.blocks else ""

    def _added(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Add a message, or a part of one, to the blocks; the events that tell of it."""
        if text := fields.get("content"):
            if not self.blocks or self.blocks[-1].call_id is not None:
                yield self._next_block(AnswerBlock(len(self.blocks)))
            yield self._add(text)
        for call in fields.get("tool_calls") or ():
            if "id" in call:
                new = AnswerBlock(len(self.blocks), name=call["function"]["name"], call_id=call["id"])
                yield self._next_block(new)
            if arguments := call["function"].get("arguments"):
                yield self._add(arguments)

    def _next_block(self, block: AnswerBlock) -> str:
        ended = self.end_block(self.blocks[-1]) if self.blocks else ""
        self.blocks.append(block)
        return ended + self.begin_block(block)

    def _add(self, piece: str) -> str:
        self.blocks[-1].text += piece
        return self.add(self.blocks[-1], piece)
