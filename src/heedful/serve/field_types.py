"""The types of the fields of request bodies, each with its validation and its JSON schema.

Types are strict: "1" and true are no numbers, 1.5 is no integer, NaN and Infinity are nothing; 2.0 is 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from heedful.serve.errors import HALF_A_PAIR, abbreviate

MAX_INT = 2**31 - 1
MAX_PROMPTS = 2048
MAX_STOPS = 4
MAX_STOP_IDS = 256
MAX_NESTING = 16  # of values for a chat template


def to_integer(value: Any) -> Any:
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
        raise FieldError(name, HALF_A_PAIR) from None


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
        value = [to_integer(token) for token in value]
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
        f"{key[:50]!r}: {abbreviate(bias)}"
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


def check_nesting(value: Any, most: int = MAX_NESTING) -> Any:
    """Values for a chat template: JSON of a few levels, in whole characters; FieldError for others."""
    level, depth = [value], 0
    while level:
        if depth > most:
            raise FieldError("", f"is nested more than {most} levels deep")
        for text in (item for item in level if isinstance(item, str)):
            _check_text("", text)
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in inner for part in (item if isinstance(item, list) else [*item, *item.values()])]
        depth += 1
    return value


def _check_truncation(value: int) -> int:
    if value != -1 and value < 1:
        raise FieldError("", f"is {value}: it must be 1 or more, or -1 for what the context leaves")
    return value


TemplateValues = Annotated[dict[Text, Any], AfterValidator(check_nesting)]
Documents = Annotated[list[dict[Text, Any]], Field(max_length=MAX_PROMPTS), AfterValidator(check_nesting)]
Truncation = Annotated[
    Annotated[Count, Field(ge=-1)],
    AfterValidator(_check_truncation),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": MAX_INT}]}),
]
