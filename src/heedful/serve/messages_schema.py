"""The bodies of Anthropic's Messages API (/v1/messages) as pydantic models: the request as a ChatRequest, the response
for the schema at /openapi.json.

The sampling parameters of completions that the API does not have (`seed`, `min_p`) are those of every request. A last
message of the assistant is the beginning of the answer. `is_error` of a tool's result is for the client alone: chat
templates have no place for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from heedful.serve import not_implemented
from heedful.serve.chat_adapter import JsonObject, to_chat_request
from heedful.serve.field_types import MAX_PROMPTS, MAX_STOPS, Count, FieldError, Flag, Integer, Text
from heedful.serve.request_schema import ChatRequest, RequestBody, SamplingRequest
from heedful.serve.response_schema import ResponseModel
from heedful.serve.tool_fields import MAX_TOOLS

# The fields of a ChatRequest by the names that they have here.
FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
REQUIRED = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
ROLES = {"tool_use": "assistant", "tool_result": "user"}  # whose messages have such blocks
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# --- the request ------------------------------------------------------------------------------------------------------


class TextBlock(RequestBody):
    """A text."""

    type: Literal["text"]
    text: Text


def _text_block(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(_text_block, json_schema_input_type=str | list[TextBlock])]


class ContentBlock(RequestBody):
    """A text, a call of a tool, or what it returned."""

    type: Literal["text", "tool_use", "tool_result"]
    text: Text | None = None
    id: Text | None = None
    name: Text | None = None
    input: JsonObject | None = None
    tool_use_id: Text | None = None
    content: Texts = Field(default_factory=list)
    is_error: Flag = False

    @model_validator(mode="after")
    def _check_block(self) -> Self:
        for name in REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise FieldError(name, f"is missing: a block of type {self.type} has one")
        return self


Blocks = Annotated[list[ContentBlock], BeforeValidator(_text_block, json_schema_input_type=str | list[ContentBlock])]


class AnthropicMessage(RequestBody):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for i, block in enumerate(self.content):
            if self.role != ROLES.get(block.type, self.role):
                whose = (
                    f"is {block.type}, in a message of the {self.role}: only the {ROLES[block.type]} has such blocks"
                )
                raise FieldError(f"content.{i}.type", whose)
        return self

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """It as messages of chat completions, where each result of a tool is one."""
        found: list[dict[str, Any]] = []
        for block in self.content:
            if block.type == "tool_result":
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)})
                continue
            if not found or found[-1]["role"] != self.role:
                found.append({"role": self.role, "content": ""})
            if block.type == "text":
                found[-1]["content"] += block.text
            else:
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                call = {"id": block.id, "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
        return found or [{"role": self.role, "content": ""}]


def joined(blocks: Sequence[TextBlock]) -> str:
    """Their text."""
    return "".join(block.text for block in blocks)


class AnthropicTool(RequestBody):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: Text
    description: Text | None = None
    input_schema: JsonObject
    strict: Flag | None = None

    @property
    def function(self) -> dict[str, Any]:
        """It as chat completions have it."""
        given = {"name": self.name, "description": self.description, "strict": self.strict}
        return {
            "type": "function",
            "function": {k: v for k, v in given.items() if v is not None} | {"parameters": self.input_schema},
        }


class AnthropicToolChoice(RequestBody):
    """Which tool is called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise FieldError("name", "is missing: which tool?")
        return self

    @property
    def chat_fields(self) -> dict[str, Any]:
        """It as fields of chat completions."""
        function = {"type": "function", "function": {"name": self.name}}
        return {
            "tool_choice": TOOL_CHOICES.get(self.type, function),
            "parallel_tool_calls": not self.disable_parallel_tool_use,
        }


class OutputFormat(RequestBody):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(RequestBody):
    """How the answer is written."""

    unsupported = not_implemented.ANTHROPIC_OUTPUT

    format: OutputFormat | None = None


class CountTokensRequest(SamplingRequest):
    """The body of /v1/messages/count_tokens: a conversation."""

    unsupported = not_implemented.ANTHROPIC_MESSAGES

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_PROMPTS)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    n: Annotated[Integer, Field(ge=1, le=1)] = 1

    @model_validator(mode="after")
    def _check_results(self) -> Self:
        if any(block.type == "tool_use" for block in self.messages[-1].content):
            raise FieldError("messages", "ends with a call of a tool: send what it returned, as a tool_result")
        return self

    def chat_request(self, more: Mapping[str, Any]) -> ChatRequest:
        """The conversation as a ChatRequest, with more fields of one."""
        messages = [message for given in self.messages for message in given.chat_messages]
        first = [{"role": "system", "content": joined(self.system)}] if self.system else []
        tools = [tool.function for tool in self.tools]
        fields: dict[str, Any] = {"messages": [*first, *messages], "tools": tools, **more}
        if messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        if self.tool_choice is not None:
            fields |= self.tool_choice.chat_fields
        if self.output_config is not None and self.output_config.format is not None:
            form = {"name": "answer", "schema": self.output_config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        return to_chat_request(self, fields)


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )

    @property
    def chat(self) -> ChatRequest:
        """It as a ChatRequest."""
        return self.chat_request({"max_completion_tokens": self.max_tokens, "stop": [*self.stop, *self.stop_sequences]})


# --- the response -----------------------------------------------------------------------------------------------------


class AnthropicUsage(ResponseModel):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int


class AnswerContent(ResponseModel):
    """A text, or a call of a tool."""

    type: Literal["text", "tool_use"]


class MessageObject(ResponseModel):
    """The response of /v1/messages, and the first event of its stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(ResponseModel):
    """How many tokens a conversation has."""

    input_tokens: int


class AnthropicErrorDetail(ResponseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(ResponseModel):
    """The body of every error of this API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
