"""Chat templates: a conversation rendered by the Jinja program that ships with a model.

The program comes from the internet, so it runs in Jinja's immutable sandbox, with a budget: the length of the
template, the number of loop turns and calls, the length of what it writes. The conversation comes from a user, so no
text in it may turn into a special token: `render_chat` marks every look-alike in it with a character that occurs
nowhere else, and `Rendered.user_made` tells afterwards which special tokens of the rendered text were typed rather
than written by the template. The marks are invisible to a template that trims, joins or searches messages.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Messages = Sequence[Mapping[str, Any]]

MAX_TEMPLATE = 200_000  # characters; the longest published templates have about 20,000
MAX_OUTPUT = 20_000_000  # characters
MAX_STEPS = 500_000  # loop turns and calls
MAX_REPEAT = 100_000  # length of a string or list made by "*", "%", center() and the like

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, counting steps and refusing operations whose result is far larger than their input."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.steps = 0
        self.filters["tojson"] = _tojson
        for name in ("center", "indent"):
            self.filters[name] = _bounded(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["_step"] = lambda: None

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS:,} steps")
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        _refuse_huge(getattr(method, "__name__", ""), getattr(method, "__self__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1_000_000 and abs(right) <= 16):
            raise jinja2.TemplateError("a power that large")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and len(many) * max(times, 0) > MAX_REPEAT:
                    raise jinja2.TemplateError(f"a repetition longer than {MAX_REPEAT:,}")
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\*|\d{4})", left):
            raise jinja2.TemplateError("a format that wide")
        return super().call_binop(context, operator, left, right)


def _refuse_huge(name: str, text: Any, args: tuple[Any, ...]) -> None:
    """Stop methods of text whose result is far larger than what goes in: "x".center(10**9) and its relatives."""
    if not isinstance(text, str):
        return
    if name in ("format", "format_map") and re.search(r"\d{5}|:[^}]*\{", text):
        raise jinja2.TemplateError("a format that wide")
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and args and args[0] > MAX_REPEAT:
        raise jinja2.TemplateError(f"{name}() wider than {MAX_REPEAT:,}")
    if name == "replace" and len(args) > 1 and len(args[1]) * (len(text) + 1) > MAX_OUTPUT:
        raise jinja2.TemplateError(f"replace() that makes more than {MAX_OUTPUT:,} characters")
    if name == "join" and args and hasattr(args[0], "__len__") and len(text) * len(args[0]) > MAX_OUTPUT:
        raise jinja2.TemplateError(f"join() that makes more than {MAX_OUTPUT:,} characters")


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> Any:
        if isinstance(width, int) and width > MAX_REPEAT:
            raise jinja2.TemplateError(f"a width of more than {MAX_REPEAT:,}")
        return filter_(value, width, *args, **kwargs)

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _count_loops(template: jinja2.nodes.Template) -> None:
    """Put a call of `_step` into every loop, so that loops without calls use up the budget too."""
    for loop in template.find_all(jinja2.nodes.For):
        step = jinja2.nodes.Call(jinja2.nodes.Name("_step", "load"), [], [], None, None)
        loop.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(loop.lineno))


def render_template(template: str, /, **variables: Any) -> str:
    """Run a chat template in the sandbox. `variables` are what the reference passes: messages, bos_token ...

    A template that is broken, refuses the conversation or exceeds its budget is a ValueError that says so.
    """
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"the chat template has {len(template):,} characters; the limit is {MAX_TEMPLATE:,}")
    sandbox = _Sandbox()
    parts: list[str] = []
    size = 0
    try:
        tree = sandbox.parse(template)
        _count_loops(tree)
        for part in sandbox.from_string(tree).generate(variables):
            size += len(part)
            if size > MAX_OUTPUT:
                raise jinja2.TemplateError(f"it writes more than {MAX_OUTPUT:,} characters")
            parts.append(part)
    except jinja2.exceptions.SecurityError as error:
        raise ValueError(f"the chat template does what the sandbox forbids: {error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError) as error:
        raise ValueError(f"the chat template could not render this conversation: {error}") from None
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"the chat template exceeds its limits: {type(error).__name__}") from None
    return "".join(parts)


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation and the positions (between characters) where the user's look-alikes were marked."""

    text: str
    marks: tuple[int, ...]

    def user_made(self, start: int, end: int) -> bool:
        """Whether a special token at text[start:end] contains text that a user typed."""
        return any(start < mark < end for mark in self.marks)


def render_chat(
    template: str,
    messages: Messages,
    special: Iterable[str],
    variables: Mapping[str, Any],
    /,
    *,
    continue_final_message: bool = False,
    **constants: Any,
) -> Rendered:
    """Render `messages`, marking what looks like a special token inside them or in the user's `variables`.

    `constants` are the variables that no user wrote. With `continue_final_message` the text ends with the content of
    the last message, which the model continues.
    """
    check_messages(messages)
    special = [name for name in special if name]
    mark, end = _unused_characters([template, *_strings(messages), *_strings(variables)], 2)
    turns = [_shield(message, special, mark) for message in messages]
    if continue_final_message:
        turns[-1]["content"] = _mark_end(turns[-1].get("content"), end + " ")
    given = {name: _shield(value, special, mark) for name, value in variables.items()}
    text = render_template(template, **{**constants, **given, "messages": turns})
    if continue_final_message:
        text = _cut_at(text, end)
    pieces = text.split(mark)
    marks, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        marks.append(position)
    return Rendered("".join(pieces), tuple(marks))


def _mark_end(content: Any, mark: str) -> Any:
    """The content of a message, with the mark behind its text."""
    if isinstance(content, str):
        return content + mark
    texts = [i for i, part in enumerate(content or ()) if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts:
        raise ValueError("the last message has no text to continue")
    last = texts[-1]
    return [{**part, "text": part["text"] + mark} if i == last else part for i, part in enumerate(content)]


def _cut_at(text: str, mark: str) -> str:
    """The rendered text up to the mark; a template that strips messages strips the last one too, as in transformers."""
    at = text.rfind(mark)
    if at < 0:
        raise ValueError("the chat template leaves out the last message, which cannot be continued then")
    cut = text[:at] if text.startswith(mark + " ", at) else text[:at].rstrip()
    return cut.replace(mark + " ", "").replace(mark, "")  # where the template writes the message twice


def check_messages(messages: Messages) -> None:
    """ValueError unless messages are a non-empty list of {"role": ..., "content": ...} with known roles."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError('messages must be a non-empty list such as [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f'message {index} must be an object with a "role" and a "content"')
        if message["role"] not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise ValueError(f"message {index} has the role {message['role']!r}; known roles: {known}")
        if not isinstance(message.get("content"), str | list | tuple | None):
            raise ValueError(f"the content of message {index} must be text or a list of parts")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _strings(part)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for part in value for text in _strings(part)]
    return []


def _unused_characters(texts: list[str], n: int) -> list[str]:
    used = set().union(*texts)
    private = map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)))
    found = list(islice((character for character in private if character not in used), n))
    if len(found) < n:
        raise ValueError("the conversation uses every private character of Unicode")
    return found


def _shield(value: Any, special: list[str], mark: str) -> Any:
    """Put `mark` inside everything in `value` that reads like a special token, or like the torn half of one."""
    if isinstance(value, str):
        return _shield_text(value, special, mark)
    if isinstance(value, Mapping):
        # keys come from the user as well (arguments of a tool call); a role was checked before
        return {
            _shield(key, special, mark): part if key == "role" else _shield(part, special, mark)
            for key, part in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_shield(part, special, mark) for part in value]
    return value


def _shield_text(text: str, special: list[str], mark: str) -> str:
    if not special:
        return text
    marks = set()
    for name in special:
        at = text.find(name)
        while at >= 0:
            marks.add(at + 1)
            at = text.find(name, at + 1)
    # halves at the ends, which the template's own words next to them could complete
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    for name in special:
        for cut in range(1, len(name)):
            if end - begin >= cut and text.endswith(name[:cut], 0, end):
                marks.add(end)
            if end - begin >= len(name) - cut and text.startswith(name[cut:], begin):
                marks.add(begin)
    pieces, last = [], 0
    for position in sorted(marks):
        pieces.append(text[last:position])
        last = position
    return mark.join([*pieces, text[last:]])
