"""Tools: functions that a chat model may call, described and called in the form that the model was trained on.

A model with tools in its chat template reads them there, as the variable `tools`, and writes a call in a form of its
own. FORMATS has the known ones, each recognized by what it leaves in the template. All of them are a few fixed texts
around the name of a function and the JSON of its arguments:

    trigger open NAME middle ARGUMENTS close  again NAME middle ARGUMENTS close  ...  end

so that one grammar (`call_grammar`) and one parser (heedful/text/tool_calls.py) are enough. A model whose template has
no place for tools gets Hermes' form: a system message describes them, and calls and results are text in messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from heedful.text.parse import parse_json


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a model writes calls: the fixed texts around names and arguments."""

    name: str
    marks: tuple[str, ...]  # texts of a chat template by which it is recognized: all of them
    trigger: str  # what tells calls from other text
    open: str  # between the trigger and the first name
    middle: str  # between a name and its arguments
    close: str  # behind arguments
    again: str | None  # before the name of another call; None: the model makes one call at a time
    end: str = ""  # behind the last call
    alone: bool = False  # calls are a whole answer; in other formats text may come before them
    optional: str = ""  # what a model may write before the trigger

    @property
    def texts(self) -> tuple[str, ...]:
        """All its fixed texts."""
        return (self.optional, self.trigger, self.open, self.middle, self.close, self.again or "", self.end)


HERMES = ToolFormat(  # NousResearch's Hermes, Qwen, and many others
    "hermes", ("<tool_call>", "arguments"), "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
)  # fmt: skip
_LIST: dict[str, Any] = {"middle": '", "arguments": ', "close": "}", "again": ', {"name": "', "end": "]"}
FORMATS = (
    HERMES,
    ToolFormat("mistral-args", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "", "[ARGS]", "", again="[TOOL_CALLS]"),
    ToolFormat("mistral-space", ("[TOOL_CALLS] [",), "[TOOL_CALLS]", ' [{"name": "', **_LIST),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", '[{"name": "', **_LIST),
    ToolFormat(  # Llama 3.1 to 3.3, whose template refuses two calls in one message
        "llama", ('{"name": function name, "parameters": ',), "{", '"name": "', '", "parameters": ', "}",
        again=None, alone=True, optional="<|python_tag|>",
    ),
)  # fmt: skip
OTHER_MARKS = ("<function=", "<arg_key>")  # of forms that resemble a known one: Qwen3-Coder's and GLM's tags

# The variable `tools` in a statement or an expression of a template, not the word in its text.
_TOOLS = re.compile(r"\{[{%][^}]*?(?<![\w.'\"<])tools(?![\w'\">])")
# Arguments of a past call written as they are, and through a filter (tojson, items).
_WRITTEN_PLAIN = re.compile(r"\+\s*[\w.\[\]'\"]*\barguments\b|\barguments['\"]?\]?\s*(\+|-?\}\})")
_FILTERED = re.compile(r"\barguments['\"]?\]?\s*\||\bfunction['\"]?\]?\s*\|\s*tojson|\bcall\s*\|\s*tojson")
MAX_ARGUMENTS_NESTING = 64
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")

# Keywords of JSON schema that are for readers, and those whose members are schemas under any name.
ANNOTATIONS = ("$schema", "$comment", "title", "description", "default", "examples", "deprecated")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # JSON as models learn it

DESCRIPTION = """\
You can call functions to help with the user's request. These are the functions, with a JSON schema of the arguments:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between tags, once for each call:
<tool_call>
{{"name": "name_of_the_function", "arguments": {{"argument": "value"}}}}
</tool_call>
You get the result of a call between <tool_response> and </tool_response>."""


@lru_cache(maxsize=64)
def reads_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return _TOOLS.search(template) is not None


@lru_cache(maxsize=64)
def find_tool_format(template: str) -> ToolFormat:
    """The form in which a model with this chat template writes calls; ValueError if it is none of FORMATS."""
    if not reads_tools(template):
        return HERMES
    for format in FORMATS:
        if all(mark in template for mark in format.marks) and not any(mark in template for mark in OTHER_MARKS):
            return format
    known = ", ".join(format.name for format in FORMATS)
    raise ValueError(f"the chat template writes calls of tools in a form that is not known here; known: {known}")


# --- prompts ----------------------------------------------------------------------------------------------------------


def with_tools(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]]:
    """Messages with calls and results as the template takes them; where it has no place for tools, they are described
    in the system's message and calls are text."""
    if reads_tools(template) or (not tools and "tool_calls" in template):
        return [_native_message(template, message) for message in messages]
    turns: list[Mapping[str, Any]] = []
    for before, message in zip([{}, *messages], messages, strict=False):
        turn = _plain_message(message)
        if message.get("role") == before.get("role") == "tool":  # results of one message's calls
            turn["content"] = f"{turns.pop()['content']}\n{turn['content']}"
        turns.append(turn)
    return _describe_tools(turns, tools) if tools else turns


def _native_message(template: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments as an object, as most templates want them, or as text; ids as Mistral's templates want them."""
    changed = dict(message)
    shortens = "[TOOL_CALLS]" in template
    if shortens and isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _mistral_id(message["tool_call_id"])
    if message.get("tool_calls"):
        as_text = bool(_WRITTEN_PLAIN.search(template)) and not _FILTERED.search(template)
        changed["tool_calls"] = [_native_call(call, as_text, shortens) for call in message["tool_calls"]]
    return changed


def _native_call(call: Mapping[str, Any], as_text: bool, shortens: bool) -> Mapping[str, Any]:
    changed = dict(call)
    if shortens and isinstance(call.get("id"), str):
        changed["id"] = _mistral_id(call["id"])
    if isinstance(call.get("function"), Mapping):
        changed["function"] = _native_call(call["function"], as_text, False)
    if "arguments" in call:
        arguments = call["arguments"]
        changed["arguments"] = arguments_text(arguments) if as_text else arguments_object(arguments)
    return changed


def _mistral_id(id: str) -> str:
    """An id of nine letters and digits: Mistral's templates refuse any other."""
    return id if _MISTRAL_ID.fullmatch(id) else re.sub(r"[^a-zA-Z0-9]", "", id)[-9:].rjust(9, "0")


def arguments_object(arguments: Any) -> Any:
    """The arguments of a call as an object; what is not the JSON of one, or nested very deeply, stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = parse_json(arguments)
    except (ValueError, RecursionError):
        return arguments
    level, depth = [found], 0
    while level and depth <= MAX_ARGUMENTS_NESTING:
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level, depth = [part for parts in inner for part in parts], depth + 1
    return found if isinstance(found, dict) and not level else arguments


def arguments_text(arguments: Any) -> str:
    """The arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without calls: those of the assistant are part of its text, and a result is a message of the user."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    texts = [_text(message)] if _text(message) else []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = arguments_text(function.get("arguments", {}))
        start, end = HERMES.trigger + HERMES.open, HERMES.middle + arguments + HERMES.close
        texts.append(f"{start}{function.get('name')}{end}")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _describe_tools(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    about = DESCRIPTION.format(tools=lines)
    if turns and turns[0].get("role") in ("system", "developer"):
        first, *rest = turns
        return [{**first, "content": f"{_text(first)}\n\n{about}"}, *rest]
    return [{"role": "system", "content": about}, *turns]


# --- grammar ----------------------------------------------------------------------------------------------------------


def uses_special_tokens(format: ToolFormat, special: Mapping[str, int]) -> bool:
    """Whether some of a format's texts are special tokens of a tokenizer."""
    return any(name in text for name in special for text in format.texts)


def call_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    required: bool = False,
    parallel: bool = True,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """A grammar in Lark's notation, with llguidance's additions, of an answer with calls of these tools.

    An answer may do without a call unless it is `required`: it is any text then, or JSON of the schema `answer`.
    `special` are the tokenizer's special tokens, which a format's texts may be.
    """
    several = parallel and format.again is not None
    more = f"({_literal(format.again or '', special)} call)*" if several else ""
    optional = f"({_literal(format.optional, special)})?" if format.optional in special else ""
    trigger = f"{optional} {_literal(format.trigger, special)}"
    lines = [
        f"calls: {_literal(format.open, special)} call {more} {_literal(format.end, special)}",
        f"call: ({' | '.join(f'call{i}' for i in range(len(tools)))}) {_literal(format.close, special)}",
    ]
    for i, tool in enumerate(tools):
        function = tool["function"]
        begin = _literal(function["name"] + format.middle, special)
        lines.append(f"call{i}: {begin} %json {json.dumps(_arguments_schema(function))}")
    if required:
        start = [f"start: {trigger} calls"]
    elif answer is not None:
        start = [f"start: answer | {trigger} calls", f"answer: %json {json.dumps({'x-guidance': WRITTEN, **answer})}"]
    elif format.alone:
        first = re.escape(format.trigger[0])
        start = [f"start: TEXT | {trigger} calls", rf"TEXT: /(\s*[^\s{first}](.|\n)*)?/"]
    else:
        start = ["start: TEXT | before calls", r"TEXT: /(.|\n)*/", f"text[lazy]: TEXT {json.dumps(format.trigger)}"]
        start.append(f"before: text | TEXT {trigger}" if format.trigger in special else "before: text")
    return "\n".join(["%llguidance {}", *start, *lines])


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A fixed text in Lark's notation; special tokens by their ids."""
    names = sorted((name for name in special if name and name in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments. Unless the function is `strict`, keywords that cannot be enforced do
    not matter."""
    schema = {"type": "object", **_without_annotations(function.get("parameters") or {"properties": {}})}
    if "properties" in schema and not {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & set(schema):
        schema.setdefault("additionalProperties", False)  # a function takes the arguments that it names
    return {**schema, "x-guidance": {**WRITTEN, "lenient": not function.get("strict")}}


def _without_annotations(schema: Any) -> Any:
    """A JSON schema without what it says to readers only."""
    if isinstance(schema, list):
        return [_without_annotations(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, part in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(part, Mapping):
            found[key] = {name: _without_annotations(inner) for name, inner in part.items()}
        elif key not in ANNOTATIONS:
            found[key] = part if key in ("const", "enum") else _without_annotations(part)
    return found
