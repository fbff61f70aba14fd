"""The fields of a request that say what the answer must match: OpenAI's `response_format`, and those of vLLM
(`structured_outputs`, `guided_json` and its kin), llama-server (`grammar`, `json_schema`) and SGLang (`regex`, `ebnf`).

A field keeps its value; `FIELDS` has for each how it becomes a Grammar, or None where it allows every text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from heedful.generate.grammar import Grammar
from heedful.serve.errors import abbreviate
from heedful.serve.field_types import FieldError, check_nesting
from heedful.serve.tool_fields import MAX_SCHEMA_NESTING

MakeGrammar = Callable[[Any], Grammar | None]
TYPES = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'


def _make(make: Callable[[Any], Grammar], value: Any, path: str = "") -> Grammar:
    try:
        return make(check_nesting(value, MAX_SCHEMA_NESTING))
    except FieldError as error:
        raise FieldError(path or error.param, error.problem) from None
    except ValueError as error:
        raise FieldError(path, f"is {abbreviate(value)}: {error}") from None


def _maker(make: Callable[[Any], Grammar], *, no_effect: Any = None) -> MakeGrammar:
    """How the value of a field becomes a grammar, if it is the grammar itself."""
    return lambda value: None if value == no_effect else _make(make, value)


def _schema(value: Any) -> Grammar:
    """The grammar of a field that is a JSON schema: an object, or its text."""
    if not isinstance(value, dict | str):
        raise ValueError("it must be a JSON schema: an object, or its text")
    return Grammar.json_schema(value)


def _member(value: dict[str, Any], *names: str) -> tuple[str, Any]:
    """The first of these members that is there, and its value; the servers have their own names for it."""
    for name in names:
        if value.get(name) is not None:
            return name, value[name]
    raise FieldError(names[0], "is missing")


def _response_format(value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object" | "json":
            given = {name: part for name in ("schema", "value") if (part := value.get(name)) is not None}
            name, schema = next(iter(given.items()), ("", {"type": "object"}))
            return _make(Grammar.json_schema, schema, name)
        case "json_schema":
            name, part = _member(value, "json_schema", "schema")
            if name == "json_schema" and not isinstance(part, dict):
                raise FieldError(name, f"is {abbreviate(part)}: it must be an object")
            if name == "json_schema":
                name, part = "json_schema.schema", part.get("schema")
            return _make(Grammar.json_schema, {"type": "object"} if part is None else part, name)
        case "regex":
            name, part = _member(value, "regex", "pattern", "value")
            return _make(Grammar.regex, part, name)
        case "grammar":
            name, part = _member(value, "grammar", "value")
            return _make(Grammar.cfg, part, name)
    what = f"has the type {abbreviate(kind)}" if isinstance(value, dict) else f"is {abbreviate(value)}"
    raise FieldError("", f"{what}: it must be {TYPES}, or of type regex or grammar")


_STRUCTURED: dict[str, Callable[[Any], Grammar]] = {
    "json": _schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.cfg,
}
_NOT_STRUCTURED = ("structural_tag", "whitespace_pattern", "disable_additional_properties")


def _structured_outputs(value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise FieldError("", f"is {abbreviate(value)}: it must be an object")
    for name in _NOT_STRUCTURED:
        if value.get(name):
            raise FieldError(name, f"is {abbreviate(value[name])}, and this server does not implement it: leave it out")
    given = [name for name in (*_STRUCTURED, "json_object") if value.get(name) not in (None, False)]
    if given[1:]:
        raise FieldError(given[1], f"and {given[0]} exclude each other: leave one out")
    if not given:
        return None
    (name,) = given
    return Grammar.json_object() if name == "json_object" else _make(_STRUCTURED[name], value[name], name)


# The fields, in the order in which they are looked at.
FIELDS: dict[str, MakeGrammar] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _maker(_schema),
    "guided_regex": _maker(Grammar.regex),
    "guided_grammar": _maker(Grammar.cfg),
    "guided_choice": _maker(Grammar.choice),
    "json_schema": _maker(_schema, no_effect={}),
    "grammar": _maker(Grammar.cfg, no_effect=""),
    "regex": _maker(Grammar.regex),
    "ebnf": _maker(Grammar.cfg),
}


def _field(name: str, schema: dict[str, Any]) -> Any:
    """The type of a field: a value that becomes a grammar."""

    def check(value: Any) -> Any:
        FIELDS[name](value)
        return value

    return Annotated[Any, PlainValidator(check), WithJsonSchema(schema)]


_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_SCHEMA: dict[str, Any] = {"anyOf": [_OBJECT, _TEXT]}
_NAMED_SCHEMA = {"type": "object", "properties": {"name": _TEXT, "schema": _OBJECT, "strict": {"type": "boolean"}}}


def _of_type(*kinds: str, **members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"enum": kinds}, **members}, "required": ["type"]}


ResponseFormat = _field(
    "response_format",
    {
        "anyOf": [
            _of_type("text", "json_object"),
            _of_type("json_schema", json_schema=_NAMED_SCHEMA),
            _of_type("regex", regex=_TEXT),
            _of_type("grammar", grammar=_TEXT),
        ]
    },
)
StructuredOutputs = _field(
    "structured_outputs",
    {
        "type": "object",
        "properties": {
            "json": _SCHEMA,
            "regex": _TEXT,
            "grammar": _TEXT,
            "choice": _TEXTS,
            "json_object": {"type": "boolean"},
        },
    },
)
GuidedJson, JsonSchema = _field("guided_json", _SCHEMA), _field("json_schema", _SCHEMA)
GuidedRegex, Regex = _field("guided_regex", _TEXT), _field("regex", _TEXT)
GuidedGrammar, ContextFree, Ebnf = _field("guided_grammar", _TEXT), _field("grammar", _TEXT), _field("ebnf", _TEXT)
GuidedChoice = _field("guided_choice", _TEXTS)
