"""The fields of a chat that are about tools: the functions that a model may call, which of them it has to call, and the
calls and results of earlier messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from heedful.serve.errors import abbreviate
from heedful.serve.field_types import FieldError, check_nesting

MAX_TOOLS = 128
MAX_TOOLS_SIZE = 2**18  # characters of the JSON of all tools, or of a message's calls
MAX_SCHEMA_NESTING = 64
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NAME_RULE = "1 to 64 letters, digits, _ and -"
MODES = ("none", "auto", "required")
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'

Tool = dict[str, Any]


def _get(value: Any, key: str, kind: type, path: str, *, default: Any = None) -> Any:
    """A member of an object that a client sent; FieldError unless it is of this kind, or absent and has a default."""
    if not isinstance(value, dict):
        raise FieldError(path, f"is {abbreviate(value)}: it must be an object")
    found = value.get(key)
    if found is None and default is not None:
        return default
    if found is None:
        raise FieldError(f"{path}.{key}", "is missing")
    if not isinstance(found, kind):
        names = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}
        raise FieldError(f"{path}.{key}", f"is {abbreviate(found)}: it must be {names[kind]}")
    return found


def _check_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(name, f"is {abbreviate(value)}: it must be a list")
    if len(value) > MAX_TOOLS:
        raise FieldError(name, f"has {len(value)} items: at most {MAX_TOOLS}")
    check_nesting(value, MAX_SCHEMA_NESTING)
    size = len(json.dumps(value))
    if size > MAX_TOOLS_SIZE:
        raise FieldError(name, f"has {size:,} characters of JSON: at most {MAX_TOOLS_SIZE:,}")
    return value


def _check_function(value: Any, path: str) -> dict[str, Any]:
    """{"type": "function", "function": {...}}: the function, whose name is valid."""
    kind = _get(value, "type", str, path, default="function")
    if kind != "function":
        raise FieldError(f"{path}.type", f"is {abbreviate(kind)}: only functions can be called here")
    function: dict[str, Any] = _get(value, "function", dict, path)
    name = _get(function, "name", str, f"{path}.function")
    if not NAME.fullmatch(name):
        raise FieldError(f"{path}.function.name", f"is {abbreviate(name)}: it must be {NAME_RULE}")
    return function


def _check_tools(value: Any) -> list[Tool]:
    """Tools without what is null."""
    tools: list[Tool] = []
    for i, tool in enumerate(_check_list("tools", value)):
        path = f"tools.{i}.function"
        function = _check_function(tool, f"tools.{i}")
        _get(function, "description", str, path, default="")
        _get(function, "strict", bool, path, default=False)
        parameters = _get(function, "parameters", dict, path, default={})
        if parameters.get("type", "object") != "object":
            kind = abbreviate(parameters["type"])
            raise FieldError(f"{path}.parameters.type", f'is {kind}: it must be "object", with the arguments by name')
        if any(function["name"] == other["function"]["name"] for other in tools):
            raise FieldError(f"{path}.name", f"is {abbreviate(function['name'])}, as that of an earlier tool")
        given = {key: part for key, part in function.items() if part is not None}
        tools.append({"type": "function", "function": given})
    return tools


class ChosenTools(NamedTuple):
    """Whether to call tools, and which."""

    mode: str = "auto"
    names: tuple[str, ...] | None = None  # None: all
    once: bool = False


def _check_choice(value: Any) -> ChosenTools:
    """A mode, a function by its name, or a mode for some of the tools."""
    if isinstance(value, str) and value in MODES:
        return ChosenTools(value)
    if not isinstance(value, dict):
        raise FieldError("tool_choice", f"is {abbreviate(value)}: it must be {CHOICES}")
    if value.get("type") != "allowed_tools":
        return ChosenTools("required", (_check_function(value, "tool_choice")["name"],), once=True)
    path = "tool_choice.allowed_tools"
    allowed = _get(value, "allowed_tools", dict, "tool_choice")
    mode = _get(allowed, "mode", str, path)
    if mode not in MODES[1:]:
        raise FieldError(f"{path}.mode", f'is {abbreviate(mode)}: it must be "auto" or "required"')
    tools = _check_list(f"{path}.tools", _get(allowed, "tools", list, path))
    return ChosenTools(mode, tuple(_check_function(tool, f"{path}.tools.{i}")["name"] for i, tool in enumerate(tools)))


def _check_calls(value: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message; their arguments are text, which need not be JSON."""
    calls = []
    for i, call in enumerate(_check_list("tool_calls", value)):
        path = f"tool_calls.{i}"
        function = _check_function(call, path)
        arguments = _get(function, "arguments", str, f"{path}.function")
        made = {"name": function["name"], "arguments": arguments}
        calls.append({"id": _get(call, "id", str, path), "type": "function", "function": made})
    return calls


class ToolCalling(NamedTuple):
    """Which functions an answer may call, whether it has to, and whether it may make several calls."""

    tools: list[Tool]
    required: bool
    parallel: bool


def tool_calling(tools: Sequence[Tool], choice: ChosenTools | None, parallel: bool) -> ToolCalling | None:
    """What an answer may call; None: nothing. FieldError for a choice of what there is not."""
    choice = choice or ChosenTools()
    known = {tool["function"]["name"]: tool for tool in tools}
    for name in choice.names or ():
        if name not in known:
            raise FieldError("tool_choice", f"names {abbreviate(name)}, which is not among the tools")
    found = list(tools) if choice.names is None else [known[name] for name in dict.fromkeys(choice.names)]
    if choice.mode == "required" and not found:
        raise FieldError("tool_choice", "requires a call, and there are no tools: send some, or leave it out")
    if not found or choice.mode == "none":
        return None
    return ToolCalling(found, choice.mode == "required", parallel and not choice.once)


_FUNCTION_NAME = {"type": "string", "pattern": f"^{NAME.pattern}$"}


def _described(**properties: Any) -> dict[str, Any]:
    """The JSON schema of a function with these members beside its name."""
    required = ["name", *(name for name in properties if name == "arguments")]
    function = {"type": "object", "properties": {"name": _FUNCTION_NAME, **properties}, "required": required}
    members = {"type": {"const": "function"}, "function": function}
    return {"type": "object", "properties": members, "required": ["type", "function"]}


_PARAMETERS = {"type": "object", "properties": {"type": {"const": "object"}}, "description": "A JSON schema"}
_DESCRIPTION = {"description": {"type": "string"}, "strict": {"type": "boolean"}, "parameters": _PARAMETERS}
_ALLOWED = {
    "type": "object",
    "properties": {"mode": {"enum": list(MODES[1:])}, "tools": {"type": "array", "items": _described()}},
    "required": ["mode", "tools"],
}
_ALLOWED_TOOLS = {
    "type": "object",
    "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED},
    "required": ["type", "allowed_tools"],
}
_CALL = _described(arguments={"type": "string"})
_CALL = {
    **_CALL,
    "properties": {"id": {"type": "string"}, **_CALL["properties"]},
    "required": ["id", *_CALL["required"]],
}

Tools = Annotated[
    list[Tool],
    PlainValidator(_check_tools),
    WithJsonSchema({"type": "array", "items": _described(**_DESCRIPTION), "maxItems": MAX_TOOLS}),
]
ToolChoice = Annotated[
    ChosenTools,
    PlainValidator(_check_choice),
    WithJsonSchema({"anyOf": [{"enum": list(MODES)}, _described(), _ALLOWED_TOOLS]}),
]
MessageCalls = Annotated[
    list[dict[str, Any]],
    PlainValidator(_check_calls),
    WithJsonSchema({"type": "array", "items": _CALL, "maxItems": MAX_TOOLS}),
]
