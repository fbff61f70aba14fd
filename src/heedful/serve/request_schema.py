"""Requests and responses of OpenAI's API, checked by pydantic: what a field may be is said here and nowhere else.

null means absent for every field, and fields we have no name for are accepted, as many user interfaces send both. A
field that would change the answer and is not implemented is refused by its name. Numbers are numbers: "1", true, 1.5
for a count, NaN and Infinity are refused; 2.0 is 2.
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

MAX_INT = 2**31 - 1  # of any count
MAX_PROMPTS = 2048
MAX_STOPS = 4


def _whole_number(value: Any) -> Any:
    """2.0 is an integer to JSON Schema, and to languages whose only numbers are floats."""
    return int(value) if type(value) is float and value.is_integer() else value


Whole = Annotated[int, Field(strict=True)]
Count = Annotated[Whole, Field(le=MAX_INT)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]


class FieldError(ValueError):
    """A value that does not fit its field, or other fields. `param` is the field's name, or its place in it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param, self.problem = param, problem


def _check_text(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise FieldError(name, "has half of a surrogate pair, which is no character: send whole ones") from None


def _characters(value: str) -> str:
    _check_text("", value)
    return value


Text = Annotated[str, Field(strict=True), AfterValidator(_characters)]

# --- fields of several shapes ---------------------------------------------------------------------------------------

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
        value = [_whole_number(token) for token in value]
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_INT:
            raise FieldError(f"{name}.{place}", f"is {abbreviate(token)}: token ids are whole numbers, 0 or more")
    return value


def _check_prompts(name: str, value: Any) -> Prompts:
    """A text, several texts, the token ids of one text, or of several."""
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
    for place, item in enumerate(value):
        if type(item) is not type(value[0]) or not isinstance(item, str | list) or item == []:
            raise FieldError(f"{name}.{place}", f"is {abbreviate(item)}: {name} must be {shapes}")
        if isinstance(item, str):
            _check_text(f"{name}.{place}", item)
    if isinstance(value[0], list):
        return [_check_ids(f"{name}.{place}", item) for place, item in enumerate(value)]
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


def _no_cut(value: Any) -> Any:
    """top_k 0 and -1 switch it off, as other servers have it."""
    return None if type(value) in (int, float) and value in (0, -1) else value


def _join_parts(value: Any) -> str:
    """A message's content: a text, or parts of which we read texts."""
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
    Annotated[Whole, Field(ge=1, le=MAX_INT)] | None,
    BeforeValidator(_no_cut),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": MAX_INT}),
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    PlainValidator(_join_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


# --- requests -------------------------------------------------------------------------------------------------------


class RequestBody(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    # Fields that are not implemented, with the values that change nothing.
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _plainly(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, harmless in cls.refused.items():
            value = body.get(name)
            if value is not None and value not in harmless:
                raise FieldError(name, f"is {abbreviate(value)}, and this server does not implement it: leave it out")
        return {name: _whole_number(value) for name, value in body.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """null is allowed wherever a field may be absent."""
        schema = handler(core)
        target = handler.resolve_ref_schema(schema)
        required = target.get("required", [])
        for name, field in target.get("properties", {}).items():
            if name not in required and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("default", "title") if key in field}
                target["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}
        for name, harmless in cls.refused.items():
            target["properties"][name] = {"enum": [None, *harmless], "description": "Not implemented"}
        return schema


class StreamOptions(RequestBody):
    include_usage: Flag = False


class SamplingRequest(RequestBody):
    """What completions and chats have in common."""

    refused = {
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
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop = ()
    n: Annotated[Whole, Field(ge=1, le=128)] = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is for streams: set stream to true, or leave it out")
        return self


class CompletionRequest(SamplingRequest):
    refused = {**SamplingRequest.refused, "suffix": ("",), "prompt_embeds": ()}

    engine: Text | None = None  # the old name of `model`
    prompt: Prompt | None = None  # None: the start of a text
    max_tokens: Annotated[Count, Field(ge=0)] = 16
    best_of: Annotated[Whole, Field(ge=1, le=20)] | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    echo: Flag = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.model = self.model if self.model is not None else self.engine
        if self.best_of is not None and self.best_of < self.n:
            raise FieldError("best_of", f"is {self.best_of} and n is {self.n}: best_of must be at least n")
        if self.stream and (self.best_of or 1) > 1:
            raise FieldError("best_of", "chooses among whole answers, and a stream cannot: leave out best_of or stream")
        return self


class Message(RequestBody):
    refused = {"tool_calls": ([],), "function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatRequest(SamplingRequest):
    refused = {
        **SamplingRequest.refused,
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
    max_tokens: Annotated[Count, Field(ge=1)] | None = None  # its old name
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_completion_tokens is None:
            self.max_completion_tokens = self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: set it to true")
        return self

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation as chat templates read it; "developer" is the newer word for "system"."""
        return [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in self.messages]


class EmbeddingRequest(RequestBody):
    input: Input
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    user: Text | None = None
