"""Tokens to text as they come: pieces that never split a character, and an end where a stop text begins.

`Detokenizer` turns tokens into pieces of text that join to the whole. `StopMatcher` looks for stop texts across the
borders of pieces and holds back what may still become one. `Writer` is both, for one answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to
CONTEXT = 6  # tokens before the first new one: more than any decoder looks back


class SupportsDecode(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """Text as it comes. Only what has not been shown is decoded again, after the tokens shown last: a decoder may
    treat the first token of a text otherwise than the others (a space before it, "##ing").

    `context` are the tokens before; where they end inside a character, the text is decoded as if it stood alone.
    """

    def __init__(self, tokenizer: SupportsDecode, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._shown = list(context[-CONTEXT:])
        if self._shown and tokenizer.decode(self._shown).endswith(BROKEN):
            self._shown = []
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        piece = self._unshown()
        if piece.endswith(BROKEN):
            return ""
        if piece:  # a token without text (a special one) tells the next decoding nothing
            self._shown = self._waiting
        else:
            self._shown = (self._shown + self._waiting)[-CONTEXT:]
        self._waiting = []
        return piece

    def flush(self) -> str:
        """What is left at the end, a broken character included."""
        piece = self._unshown() if self._waiting else ""
        self._shown, self._waiting = self._shown + self._waiting, []
        return piece

    def _unshown(self) -> str:
        before = self.tokenizer.decode(self._shown)
        return self.tokenizer.decode(self._shown + self._waiting)[len(before) :]


def stream_pieces(tokens: Iterable[int], tokenizer: SupportsDecode) -> Iterator[str]:
    """The pieces of a text that stands alone."""
    text = Detokenizer(tokenizer)
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.flush():
        yield piece


class StopMatcher:
    """Lets text through up to the first stop text: the one that is complete first, whatever the pieces were."""

    def __init__(self, stop: Sequence[str]) -> None:
        assert "" not in stop
        self.stop = tuple(stop)
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        if self.found or not text:
            return ""
        text = self._held + text
        ends = [(at + len(s), at) for s in self.stop if (at := text.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((self._overlap(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end has come: what was held back is no stop text."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How much of the text's end is the stop text's beginning."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class StoppingDetokenizer:
    """The text of one answer; without a tokenizer it stays empty."""

    def __init__(self, tokenizer: SupportsDecode | None, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop texts need a tokenizer: give the engine one, or use stop_ids")
        self._text = None if tokenizer is None else Detokenizer(tokenizer, context)
        self._stop = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def push(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        return "" if self._text is None else self._stop.push(self._text.push(token))

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self._text is None or self.stopped:
            return ""
        return self._stop.push(self._text.flush()) + self._stop.flush()
