"""Calls of tools in the text of an answer, found piece by piece as it is generated (heedful/text/tools.py has the
formats). What may still become a call is held back; the arguments of a call are passed on as they come."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from heedful.text.tools import ToolFormat

Piece = tuple[Literal["text", "name", "arguments"], str]  # a name begins a call, to which the next arguments belong


@dataclass
class ToolCall:
    """A call: the name of a function, and its arguments as JSON text."""

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class _Patterns:
    """A format's texts as regular expressions, for any whitespace between their parts."""

    trigger: re.Pattern[str]
    held: re.Pattern[str]  # the end of a text that may become the trigger
    first: re.Pattern[str]  # from the trigger to the first arguments
    again: re.Pattern[str] | None  # from arguments to the next ones
    done: re.Pattern[str]  # from the last arguments to the end


@lru_cache
def _patterns(format: ToolFormat) -> _Patterns:
    name = r"(?P<name>[\w.-]+)" + _flexible(format.middle) + r"\s*(?=\{)"
    optional = f"(?:{re.escape(format.optional)})?" if format.optional else ""
    starts = "|".join(_beginning(text) for text in (format.optional, format.trigger) if text)
    where = r"\A" if format.alone else ""
    again = None if format.again is None else re.compile(_flexible(format.close + format.again) + name)
    return _Patterns(
        re.compile(rf"{where}\s*{optional}\s*{re.escape(format.trigger)}"),
        re.compile(rf"{where}\s*{optional}\s*(?:{starts})?\Z"),
        re.compile(_flexible(format.open) + name),
        again,
        re.compile(_flexible(format.close + format.end)),
    )


def _flexible(text: str) -> str:
    """A regular expression for a text with any whitespace between its words and signs."""
    return r"\s*" + r"\s*".join(map(re.escape, re.findall(r"[\w/]+|[^\w\s]", text)))


def _beginning(text: str) -> str:
    """A regular expression for the beginnings of a text."""
    return "".join(f"(?:{re.escape(character)}" for character in text) + ")?" * len(text)


class CallParser:
    """Divides the text of one answer into text and calls, as it comes."""

    def __init__(self, format: ToolFormat) -> None:
        self._patterns, self._alone = _patterns(format), format.alone
        self._state: Callable[[], list[Piece]] = self._read_text
        self._held = ""
        self._before = ""  # the trigger, as it was written
        self._depth, self._quoted, self._escaped = 0, False, False  # within arguments
        self.text = ""  # so far, without calls
        self.calls: list[ToolCall] = []

    @property
    def complete(self) -> bool:
        """Whether there are calls, and the arguments of the last one are complete."""
        return bool(self.calls) and self._state != self._read_arguments

    def push(self, text: str) -> list[Piece]:
        """What a piece of text adds."""
        self._held += text
        found: list[Piece] = []
        state = None
        while state != self._state:
            state = self._state
            found += state()
        return self._added(found)

    def _added(self, pieces: list[Piece]) -> list[Piece]:
        for kind, piece in pieces:
            if kind == "text":
                self.text += piece
            elif kind == "name":
                self.calls.append(ToolCall(piece))
            else:
                self.calls[-1].arguments += piece
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        text = "" if self.calls else self._before + self._held  # what is held behind a call would be the next one
        self._held = self._before = ""
        return self._added([("text", text)] if text else [])

    def _read_text(self) -> list[Piece]:
        found = self._patterns.trigger.search(self._held)
        if found:
            text, self._before, self._held = self._held[: found.start()], found[0], self._held[found.end() :]
            self._state = self._read_name
        else:
            keep = self._patterns.held.search(self._held)
            at = keep.start() if keep else len(self._held)
            text, self._held = self._held[:at], self._held[at:]
            if text and self._alone:
                self._state = self._read_rest
        return [("text", text)] if text else []

    def _read_rest(self) -> list[Piece]:
        """Text after which there are no calls."""
        text, self._held = self._held, ""
        return [("text", text)] if text else []

    def _read_name(self) -> list[Piece]:
        return self._begin_call(self._patterns.first.match(self._held))

    def _begin_call(self, found: re.Match[str] | None) -> list[Piece]:
        if not found:
            return []
        self._held, self._before = self._held[found.end() :], ""
        self._state = self._read_arguments
        return [("name", found["name"])]

    def _read_arguments(self) -> list[Piece]:
        """Up to the brace that closes the object."""
        end = len(self._held)
        for at, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    end, self._state = at + 1, self._read_close
                    break
        piece, self._held = self._held[:end], self._held[end:]
        return [("arguments", piece)] if piece else []

    def _read_close(self) -> list[Piece]:
        again, done = self._patterns.again, self._patterns.done.match(self._held)
        if done:
            self._held = self._held[done.end() :]
            self._state = self._read_text
            return []
        return self._begin_call(again.match(self._held) if again else None)


def parse_calls(format: ToolFormat, text: str) -> CallParser:
    """A whole answer: its `text` without calls, and its `calls`."""
    parser = CallParser(format)
    parser.push(text)
    parser.finish()
    return parser
