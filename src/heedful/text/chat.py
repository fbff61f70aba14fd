"""Chat templates: a conversation rendered by the Jinja program that ships with a model.

The program comes from the internet, so it runs in a sandbox with limits on memory and time (heedful/text/template.py).
The conversation comes from a user, so no text in it may turn into a special token: `render_chat` marks every look-alike
in it with a character that occurs nowhere else, and `Rendered.user_made` tells afterwards which special tokens of the
rendered text were typed rather than written by the template. The marks are invisible to a template that trims, joins or
searches messages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from heedful.text.template import render_template, render_templates
from heedful.text.template_sandbox import GENERATION_MARKS
from heedful.text.tools import with_tools

Messages = Sequence[Mapping[str, Any]]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation and the positions (between characters) where the user's look-alikes were marked."""

    text: str
    marks: tuple[int, ...]
    generated: tuple[tuple[int, int], ...] = ()  # what the template marks as the assistant's: {% generation %}

    def user_made(self, start: int, end: int) -> bool:
        """Whether a special token at text[start:end] contains text that a user typed."""
        return any(start < mark < end for mark in self.marks)

    def tail(self, n: int) -> Rendered:
        """Its last n characters."""
        cut = max(0, len(self.text) - n)
        generated = tuple((max(0, start - cut), end - cut) for start, end in self.generated if end > cut)
        return Rendered(self.text[cut:], tuple(mark - cut for mark in self.marks if mark > cut), generated)


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
    given, marks = _template_variables(
        template, messages, special, variables, continue_final_message=continue_final_message
    )
    return _find_marks(render_template(template, **{**constants, **given}), marks, continue_final_message)


def render_chats(
    template: str, chats: Sequence[tuple[Messages, Mapping[str, Any]]], special: Iterable[str], **constants: Any
) -> list[Rendered]:
    """`render_chat` of many conversations, each with the variables that its user wrote, in one go."""
    names = list(special)
    prepared = [_template_variables(template, messages, names, variables) for messages, variables in chats]
    texts = render_templates(template, [{**constants, **given} for given, _ in prepared])
    return [_find_marks(text, marks) for text, (_, marks) in zip(texts, prepared, strict=True)]


def _template_variables(
    template: str,
    messages: Messages,
    special: Iterable[str],
    variables: Mapping[str, Any],
    *,
    continue_final_message: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """The variables of a template with what users wrote marked, and four marks: of look-alikes, of the end of the last
    message, of the begin and the end of what the assistant wrote."""
    check_messages(messages)
    messages = with_tools(template, messages, variables.get("tools"))
    special = [name for name in special if name]
    mark, end, *generation = _unused_characters([template, *strings_in(messages), *strings_in(variables)], 4)
    turns = [_shield(message, special, mark) for message in messages]
    if continue_final_message:
        turns[-1]["content"] = _mark_end(turns[-1].get("content"), end + " ")
    given = {name: _shield(value, special, mark) for name, value in variables.items()}
    marking = dict(zip(GENERATION_MARKS, generation, strict=True))
    return {**given, **marking, "messages": turns}, [mark, end, *generation]


def _find_marks(text: str, characters: Sequence[str], continue_final_message: bool = False) -> Rendered:
    """A rendered text without its marks, and where they were."""
    mark, end, *generation = characters
    if continue_final_message:
        text = _cut_at(text, end)
    pieces: list[str] = []
    places: dict[str, list[int]] = {mark: [], generation[0]: [], generation[1]: []}
    position = 0
    for piece in re.split(f"([{''.join(places)}])", text):
        if piece in places:
            places[piece].append(position)
        else:
            pieces.append(piece)
            position += len(piece)
    marks, begins, ends = places.values()
    return Rendered("".join(pieces), tuple(marks), tuple(zip(begins, ends, strict=True)))


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
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(f"the tool_calls of message {index} must be a list of objects")


def strings_in(value: Any) -> list[str]:
    """All texts in a value made of lists and mappings, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in strings_in(part)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for part in value for text in strings_in(part)]
    return []


def _unused_characters(texts: list[str], n: int) -> list[str]:
    used = set().union(*texts)
    private = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
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


@lru_cache(maxsize=64)
def _torn_halves(special: tuple[str, ...]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The halves of torn special tokens: the first ones by their last character, the second ones by their first."""
    firsts, seconds = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for name in special:
        for cut in range(1, len(name)):
            firsts[name[cut - 1]].append(name[:cut])
            seconds[name[cut]].append(name[cut:])
    return dict(firsts), dict(seconds)


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
    if end > begin:
        firsts, seconds = _torn_halves(tuple(special))
        if any(text.endswith(half, begin, end) for half in firsts.get(text[end - 1], ())):
            marks.add(end)
        if any(text.startswith(half, begin, end) for half in seconds.get(text[begin], ())):
            marks.add(begin)
    pieces, last = [], 0
    for position in sorted(marks):
        pieces.append(text[last:position])
        last = position
    return mark.join([*pieces, text[last:]])
