"""The request bodies of OpenAI's API as pydantic models: the validation of every field is here and nowhere else.

null means absent for every field, and unknown fields are accepted, since many user interfaces send both. A field that
would change the answer and is not implemented is rejected by its name. Types are strict: "1" and true are no numbers,
1.5 is no integer, NaN and Infinity are nothing; 2.0 is 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from heedful.serve.errors import abbreviate

MAX_INT = 2**31 - 1
MAX_PROMPTS = 2048
MAX_STOPS = 4


def _to_integer(value: Any) -> Any:
    """2.0 as 2: it is an integer in JSON Schema, and in languages whose only numbers are floats."""
    return int(value) if type(value) is float and value.is_integer() else value


Integer = Annotated[int, Field(strict=True)]
Count = Annotated[Integer, Field(le=MAX_INT)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]


class FieldError(ValueError):
    """A value that is not valid for its field, or with other fields; `param` is the path of the field."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param, self.problem = param, problem


def _check_text(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise FieldError(name, "has half of a surrogate pair, which is no character: send whole ones") from None


def _check_characters(value: str) -> str:
    _check_text("", value)
    return value


Text = Annotated[str, Field(strict=True), AfterValidator(_check_characters)]

# --- fields of several types ----------------------------------------------------------------------------------------

Prompts = str | list[str] | list[int] | list[list[int]]

_ID = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
_PROMPT_SHAPES = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
    {"type": "array", "items": _ID, "minItems": 1},
    {
        "type": "array",
        "items": {"type": "array", "items": _ID, "minItems": 1},
        "minItems": 1,
        "maxItems": MAX_PROMPTS,
    },
]


def _check_ids(name: str, value: list[Any]) -> list[int]:
    if set(map(type, value)) != {int}:
        value = [_to_integer(token) for token in value]
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_INT:
            raise FieldError(f"{name}.{i}", f"is {abbreviate(token)}: token ids are whole numbers, 0 or more")
    return value


def _check_prompts(name: str, value: Any) -> Prompts:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        _check_text(name, value)
        return value
    shapes = "a string, a list of strings, a list of token ids or a list of such lists"
    if not isinstance(value, list):
        raise FieldError(name, f"is {abbreviate(value)}: it must be {shapes}")
    if not value:
        raise FieldError(name, f"is an empty list: it must be {shapes}")
    if isinstance(value[0], int | float):
        return _check_ids(name, value)
    if len(value) > MAX_PROMPTS:
        raise FieldError(name, f"has {len(value)} items: at most {MAX_PROMPTS}")
    for i, item in enumerate(value):
        if type(item) is not type(value[0]) or not isinstance(item, str | list) or item == []:
            raise FieldError(f"{name}.{i}", f"is {abbreviate(item)}: {name} must be {shapes}")
        if isinstance(item, str):
            _check_text(f"{name}.{i}", item)
    if isinstance(value[0], list):
        return [_check_ids(f"{name}.{i}", item) for i, item in enumerate(value)]
    return value


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise FieldError("stop", f"is {abbreviate(value)}: it must be a string or a list of up to {MAX_STOPS}")
    if len(stops) > MAX_STOPS:
        raise FieldError("stop", f"has {len(stops)} strings: at most {MAX_STOPS}")
    if "" in stops:
        raise FieldError("stop", "has an empty string, which would end every answer at once")
    for stop in stops:
        _check_text("stop", stop)
    return tuple(stops)


def _check_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise FieldError("logit_bias", f'is {abbreviate(value)}: it must be an object, as {{"50256": -100}}')
    bad = [
        f"{key!r}: {abbreviate(bias)}"
        for key, bias in value.items()
        if not _is_id(key) or isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 100
    ]
    if bad:
        some = ", ".join(bad[:20]) + (f" and {len(bad) - 20} more" if len(bad) > 20 else "")
        raise FieldError("logit_bias", f"{{{some}}}: keys are token ids, biases from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _is_id(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10


def _disable_zero(value: Any) -> Any:
    """top_k 0 and -1 disable it, as in other servers."""
    return None if type(value) in (int, float) and value in (0, -1) else value


def _join_content(value: Any) -> str:
    """A message's content as one text: it is a string, or a list of parts of type text."""
    if isinstance(value, str):
        _check_text("content", value)
        return value
    if not isinstance(value, list):
        raise FieldError("content", f"is {abbreviate(value)}: it must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"a part of type {abbreviate(kind)}" if isinstance(part, dict) else abbreviate(part)
            raise FieldError("content", f'has {what}: only {{"type": "text", "text": ...}} can be read')
        if not isinstance(part.get("text"), str):
            raise FieldError("content", f"has a part whose text is {abbreviate(part.get('text'))}: it must be a string")
        _check_text("content", part["text"])
    return "".join(part["text"] for part in value)


Prompt = Annotated[
    Prompts, PlainValidator(lambda v: _check_prompts("prompt", v)), WithJsonSchema({"anyOf": _PROMPT_SHAPES})
]
Input = Annotated[
    Prompts, PlainValidator(lambda v: _check_prompts("input", v)), WithJsonSchema({"anyOf": _PROMPT_SHAPES})
]
_STOP = {"type": "string", "minLength": 1}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
Bias = Annotated[
    dict[int, float],
    PlainValidator(_check_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
TopK = Annotated[
    Annotated[Integer, Field(ge=1, le=MAX_INT)] | None,
    BeforeValidator(_disable_zero),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": MAX_INT}),
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    PlainValidator(_join_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


# --- requests -------------------------------------------------------------------------------------------------------


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
        return {name: _to_integer(value) for name, value in body.items() if value is not None}

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

    unsupported = {
        "response_format": ({"type": "text"},),
        "grammar": ("",),
        "json_schema": ({},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "structured_outputs": (),
        "bad_words": ([],),
        "stop_token_ids": ([],),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "typical_p": (1,),
        "repeat_penalty": (1,),
        "mirostat": (0,),
    }

    model: Text | None = None  # None: the only one served
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    top_k: TopK = None
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Bias = {}
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop = ()
    n: Annotated[Integer, Field(ge=1, le=128)] = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is for streams: set stream to true, or leave it out")
        return self


class CompletionRequest(SamplingRequest):
    """The body of /v1/completions."""

    unsupported = {**SamplingRequest.unsupported, "suffix": ("",), "prompt_embeds": ()}

    engine: Text | None = None  # the old name of `model`
    prompt: Prompt | None = None  # None: the start of a text
    max_tokens: Annotated[Count, Field(ge=0)] = 16
    best_of: Annotated[Integer, Field(ge=1, le=20)] | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = None
    echo: Flag = False

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        self.model = self.model if self.model is not None else self.engine
        if self.best_of is not None and self.best_of < self.n:
            raise FieldError("best_of", f"is {self.best_of} and n is {self.n}: best_of must be at least n")
        if self.stream and (self.best_of or 1) > 1:
            raise FieldError("best_of", "chooses among whole answers, and a stream cannot: leave out best_of or stream")
        return self


class Message(RequestBody):
    """A message of a conversation."""

    unsupported = {"tool_calls": ([],), "function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatRequest(SamplingRequest):
    """The body of /v1/chat/completions."""

    unsupported = {
        **SamplingRequest.unsupported,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_PROMPTS)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None  # the older name of max_completion_tokens
    logprobs: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_completion_tokens is None:
            self.max_completion_tokens = self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: set it to true")
        return self

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages as chat templates take them; "developer" is OpenAI's newer name for "system"."""
        return [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in self.messages]


class EmbeddingRequest(RequestBody):
    """The body of /v1/embeddings."""

    input: Input
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    user: Text | None = None
