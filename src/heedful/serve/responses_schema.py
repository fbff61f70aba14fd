"""The bodies of OpenAI's Responses API (/v1/responses) as pydantic models: the request as a ChatRequest, the response
for the schema at /openapi.json.

The sampling parameters of completions that the API does not have (`seed`, `stop`, `top_k`) are those of every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from heedful.serve import not_implemented
from heedful.serve.chat_adapter import JsonObject, to_chat_request
from heedful.serve.field_types import MAX_PROMPTS, Count, FieldError, Flag, Integer, Text
from heedful.serve.request_schema import ChatRequest, RequestBody, SamplingRequest
from heedful.serve.response_schema import ResponseModel
from heedful.serve.tool_fields import MAX_TOOLS

# The fields of a ChatRequest by the names that they have here.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}
REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}

NESTED = {"name", "description", "parameters", "strict"}  # what chat completions have within a tool's `function`

# --- the request ------------------------------------------------------------------------------------------------------


class TextPart(RequestBody):
    """A part of a message: text."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


def _text_part(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _user_message(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _tagged(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


Parts = Annotated[list[TextPart], BeforeValidator(_text_part, json_schema_input_type=str | list[TextPart])]


class InputItem(RequestBody):
    """An item of a conversation: a message, a call of a function, or what it returned."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: Text | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Parts | None = None

    @model_validator(mode="after")
    def _check_item(self) -> Self:
        for name in REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise FieldError(name, f"is missing: an item of type {self.type} has one")
        return self

    @property
    def text(self) -> str:
        """The text of a message, or of what a function returned."""
        return "".join(part.text for part in self.content or self.output or ())

    def listed(self, id: str) -> dict[str, Any]:
        """The item as /v1/responses/{id}/input_items lists it."""
        found: dict[str, Any] = {"id": id, "type": self.type, "status": "completed"}
        if self.type == "message":
            kind = "output_text" if self.role == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if self.role == "assistant" else {}
            return {**found, "role": self.role, "content": [{"type": kind, "text": self.text, **more}]}
        if self.type == "function_call":
            return {**found, "call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {**found, "call_id": self.call_id, "output": self.text}


Items = Annotated[
    list[InputItem],
    BeforeValidator(_user_message, json_schema_input_type=str | list[InputItem]),
    Field(min_length=1, max_length=MAX_PROMPTS),
]


class TextFormat(RequestBody):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: Flag | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise FieldError("schema", "is missing: give the JSON schema of the answer")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """It as chat completions have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        given = {"name": self.name or "answer", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": {name: value for name, value in given.items() if value is not None}}


class TextConfig(RequestBody):
    """How the answer's text is written."""

    unsupported = not_implemented.RESPONSES_TEXT

    format: TextFormat = TextFormat()


class NamedFunction(RequestBody):
    """A function that may be called."""

    type: Literal["function"]
    name: Text


class FlatFunctionTool(NamedFunction):
    """A function that the model may call."""

    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None

    @property
    def nested(self) -> dict[str, Any]:
        """It as chat completions have it."""
        return {"type": self.type, "function": self.model_dump(include=NESTED, exclude_none=True)}


class FlatToolChoice(RequestBody):
    """Which function is called, if any."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    name: Text | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedFunction], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        for name in {"function": ("name",), "allowed_tools": ("mode", "tools")}.get(self.type, ()):
            if getattr(self, name) is None:
                raise FieldError(name, f"is missing: a choice of type {self.type} has one")
        return self

    @property
    def nested(self) -> str | dict[str, Any]:
        """It as chat completions have it."""
        if self.type == "function":
            return {"type": self.type, "function": {"name": self.name}}
        if self.type == "allowed_tools":
            tools = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools or ()]
            return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": tools}}
        return self.type

    @property
    def listed(self) -> str | dict[str, Any]:
        """It as a response repeats it."""
        return self.model_dump(exclude_none=True) if self.type in ("function", "allowed_tools") else self.type


Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
]
ToolChoiceField = Annotated[
    FlatToolChoice,
    BeforeValidator(_tagged, json_schema_input_type=Literal["none", "auto", "required"] | FlatToolChoice),
]


class ResponsesRequest(SamplingRequest):
    """The body of /v1/responses."""

    unsupported = not_implemented.RESPONSES

    input: Items
    instructions: Text | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    text: TextConfig = TextConfig()
    tools: Annotated[list[FlatFunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoiceField = FlatToolChoice(type="auto")
    parallel_tool_calls: Flag = True
    metadata: Metadata = Field(default_factory=dict)
    store: Flag = True
    truncation: Literal["auto", "disabled"] = "disabled"
    n: Annotated[Integer, Field(ge=1, le=1)] = 1

    def chat_request(self, items: Sequence[InputItem]) -> ChatRequest:
        """The conversation of these items, with the instructions, as a ChatRequest."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields: dict[str, Any] = {
            "messages": [*first, *chat_messages(items)],
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.text.format.type != "text":
            fields["response_format"] = self.text.format.response_format
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        fields["tools"] = [tool.nested for tool in self.tools]
        fields |= {"tool_choice": self.tool_choice.nested, "parallel_tool_calls": self.parallel_tool_calls}
        return to_chat_request(self, fields)


def chat_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a conversation; calls belong to the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item.type == "message":
            messages.append({"role": item.role, "content": item.text})
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


# --- the response -----------------------------------------------------------------------------------------------------


class ResponsesUsage(ResponseModel):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class OutputItem(ResponseModel):
    """A message, or a call of a function."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseObject(ResponseModel):
    """The response of /v1/responses, also within the first and the last events of its stream."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None


class InputItemList(ResponseModel):
    """The items that a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(ResponseModel):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
