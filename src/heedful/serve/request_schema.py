"""The request bodies of OpenAI's API as pydantic models: every field is here, its type in `field_types`.

null means absent for every field, and unknown fields are accepted, since many user interfaces send both. A field that
would change the answer and is not implemented is rejected by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from heedful.generate.grammar import Grammar
from heedful.serve import not_implemented
from heedful.serve.errors import abbreviate
from heedful.serve.field_types import (
    MAX_PROMPTS,
    MAX_STOP_IDS,
    Bias,
    Content,
    Count,
    Documents,
    FieldError,
    Flag,
    Input,
    Integer,
    Number,
    Penalty,
    Prompt,
    Stop,
    TemplateValues,
    Text,
    TopK,
    Truncation,
    to_integer,
)
from heedful.serve.grammar_fields import (
    FIELDS,
    ContextFree,
    Ebnf,
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    JsonSchema,
    Regex,
    ResponseFormat,
    StructuredOutputs,
)
from heedful.serve.tool_fields import MessageCalls, ToolCalling, ToolChoice, Tools, tool_calling


class RequestBody(BaseModel):
    """A JSON object in which null means absent."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    # Fields that are not implemented, with the values that have no effect and are accepted.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, accepted in cls.unsupported.items():
            value = body.get(name)
            if value is not None and value not in accepted:
                raise FieldError(name, f"is {abbreviate(value)}, and this server does not implement it: leave it out")
        return {name: to_integer(value) for name, value in body.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema also allows null wherever a field may be absent."""
        schema = handler(core)
        target = handler.resolve_ref_schema(schema)
        required = target.get("required", [])
        for name, field in target.get("properties", {}).items():
            if name not in required and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("default", "title") if key in field}
                target["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}
        for name, accepted in cls.unsupported.items():
            target["properties"][name] = {"enum": [None, *accepted], "description": "Not implemented"}
        return schema


class StreamOptions(RequestBody):
    """Options of a streamed response."""

    include_usage: Flag = False


class SamplingRequest(RequestBody):
    """The fields that completions and chat completions share."""

    unsupported = not_implemented.SAMPLING

    model: Text | None = None  # None: the only one served
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    top_k: TopK = None
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    typical_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    no_repeat_ngram_size: Annotated[Count, Field(ge=0)] = 0
    logit_bias: Bias = {}
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop = ()
    stop_token_ids: Annotated[list[Annotated[Count, Field(ge=0)]], Field(max_length=MAX_STOP_IDS)] = []
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    ignore_eos: Flag = False
    min_tokens: Annotated[Count, Field(ge=0)] = 0
    truncate_prompt_tokens: Truncation | None = None  # -1: what the context leaves for the prompt
    response_format: ResponseFormat = None  # this and the next nine: what the answer must match, one of them
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_grammar: GuidedGrammar = None
    guided_choice: GuidedChoice = None
    json_schema: JsonSchema = None
    grammar: ContextFree = None
    regex: Regex = None
    ebnf: Ebnf = None
    n: Annotated[Integer, Field(ge=1, le=128)] = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def answer_grammar(self) -> tuple[str, Grammar] | None:
        """What the answer must match, with the name of its field; FieldError for more than one."""
        given = {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}
        found = [(name, grammar) for name, value in given.items() if (grammar := FIELDS[name](value)) is not None]
        if found[1:]:
            raise FieldError(found[1][0], f"and {found[0][0]} exclude each other: leave one out")
        return found[0] if found else None

    def check_min_tokens(self, name: str, most: int | None) -> None:
        """FieldError if at least more tokens are asked for than at most; `name` is the field of the latter."""
        if most is not None and self.min_tokens > most:
            raise FieldError("min_tokens", f"is {self.min_tokens} and {name} is {most}: it must not be more than that")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is for streams: set stream to true, or leave it out")
        self.answer_grammar  # noqa: B018  (checks that there is one at most)
        return self


class CompletionRequest(SamplingRequest):
    """The body of /v1/completions."""

    unsupported = not_implemented.COMPLETION

    engine: Text | None = None  # the old name of `model`
    prompt: Prompt | None = None  # None: the start of a text
    max_tokens: Annotated[Count, Field(ge=0)] = 16
    best_of: Annotated[Integer, Field(ge=1, le=20)] | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = None
    echo: Flag = False
    allow_special: Flag = False  # special tokens written in the prompt are those tokens, not text
    add_special_tokens: Flag = True
    suffix: Text = ""  # for models that can fill in the middle

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        self.check_min_tokens("max_tokens", self.max_tokens)
        if self.suffix and not (self.prompt is None or isinstance(self.prompt, str)):
            raise FieldError("suffix", "needs a prompt that is one text: send one request for each")
        if self.suffix and self.echo:
            raise FieldError("suffix", "and echo do not go together: leave one out")
        self.model = self.model if self.model is not None else self.engine
        if self.best_of is not None and self.best_of < self.n:
            raise FieldError("best_of", f"is {self.best_of} and n is {self.n}: best_of must be at least n")
        if self.stream and (self.best_of or 1) > 1:
            raise FieldError("best_of", "chooses among whole answers, and a stream cannot: leave out best_of or stream")
        return self


class Message(RequestBody):
    """A message of a conversation."""

    unsupported = not_implemented.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    tool_calls: MessageCalls = []  # of the assistant
    tool_call_id: Text | None = None  # of a tool's message: the call whose result it is

    @model_validator(mode="before")
    @classmethod
    def _empty_content(cls, body: Any) -> Any:
        """An assistant's message without content, which OpenAI's API allows, is an empty one."""
        empty = isinstance(body, dict) and body.get("role") == "assistant" and body.get("content") is None
        return {**body, "content": ""} if empty else body

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", f"is in a message of the {self.role}: calls are the assistant's")
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError("tool_call_id", "is missing: which call has this result?")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it; "developer" is OpenAI's newer name for "system"."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
        return found | ({"tool_call_id": self.tool_call_id} if self.role == "tool" else {})


class ChatRequest(SamplingRequest):
    """The body of /v1/chat/completions."""

    unsupported = not_implemented.CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_PROMPTS)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None  # the older name of max_completion_tokens
    logprobs: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    add_special_tokens: Flag = False  # around the template's text
    add_generation_prompt: Flag | None = None  # None: unless the last message is continued
    continue_final_message: Flag = False
    tools: Tools = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag = True
    chat_template_kwargs: TemplateValues = {}
    documents: Documents = []
    reasoning_effort: Text | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_completion_tokens is None:
            self.max_completion_tokens = self.max_tokens
        self.check_min_tokens("max_completion_tokens", self.max_completion_tokens)
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message", "and add_generation_prompt exclude each other: leave one out")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: set it to true")
        tool_calling(self.tools, self.tool_choice, self.parallel_tool_calls)  # checks the choice
        return self

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return [message.turn for message in self.messages]

    @property
    def tool_calling(self) -> ToolCalling | None:
        """Which tools the answer may call; None: none."""
        return tool_calling(self.tools, self.tool_choice, self.parallel_tool_calls)


class EmbeddingRequest(RequestBody):
    """The body of /v1/embeddings."""

    unsupported = not_implemented.EMBEDDING

    input: Input
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    user: Text | None = None
