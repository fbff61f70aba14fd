"""Incremental detokenization: tokens to text that never splits a character, and an end where a stop string begins.

`Detokenizer` turns tokens into pieces of text that join to the whole. `StopMatcher` finds stop strings across the
borders of pieces and holds back text that may still become one. `StoppingDetokenizer` is both, for one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
CONTEXT = 6  # tokens before the first new one: more than any decoder looks back


class SupportsDecode(Protocol):
    """The one method that generation needs of a tokenizer."""

    def decode(self, ids: Sequence[int], /, *, skip_special: bool = True) -> str:
        """The text of token ids; without `skip_special` special tokens are their names."""
        ...


class Detokenizer:
    """Text of tokens as they come. Only new tokens are decoded, after the last ones emitted: a decoder may treat the
    first token of a text otherwise than the others (a space before it, "##ing").

    `context` are the tokens before; where they end inside a character, the text is decoded as if it stood alone.
    """

    def __init__(self, tokenizer: SupportsDecode, context: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._decode = tokenizer.decode if skip_special else partial(tokenizer.decode, skip_special=False)
        self._emitted = list(context[-CONTEXT:])
        if self._emitted and self._decode(self._emitted).endswith(REPLACEMENT):
            self._emitted = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that a token completes; empty while a character is incomplete."""
        self._pending.append(token)
        piece = self._decode_pending()
        if piece.endswith(REPLACEMENT):
            return ""
        if piece:  # a token without text (a special one) is no context for the next
            self._emitted = self._pending
        else:
            self._emitted = (self._emitted + self._pending)[-CONTEXT:]
        self._pending = []
        return piece

    def flush(self) -> str:
        """The rest at the end, an incomplete character included."""
        piece = self._decode_pending() if self._pending else ""
        self._emitted, self._pending = self._emitted + self._pending, []
        return piece

    def _decode_pending(self) -> str:
        before = self._decode(self._emitted)
        return self._decode(self._emitted + self._pending)[len(before) :]


def stream_pieces(tokens: Iterable[int], tokenizer: SupportsDecode) -> Iterator[str]:
    """The non-empty pieces of a text that stands alone."""
    text = Detokenizer(tokenizer)
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.flush():
        yield piece


class StopMatcher:
    """Lets text through up to the first stop string: the one that is complete first, however the text is divided.

    With `include` up to its end, else up to its beginning.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        assert "" not in stop
        self.stop, self.include = tuple(stop), include
        self.found: str | None = None  # the stop string that ended the text
        self._held = ""

    def push(self, text: str) -> str:
        """The text that cannot be part of a stop string; what may be the beginning of one is held back."""
        if self.found is not None or not text:
            return ""
        text = self._held + text
        ends = [(at + len(s), at) for s in self.stop if (at := text.find(s)) >= 0]
        if ends:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return text[: end if self.include else at]
        keep = max((self._overlap(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back text, when no more comes."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How much of the text's end is the stop string's beginning."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class StoppingDetokenizer:
    """A `Detokenizer` that ends at stop strings; without a tokenizer its text stays empty."""

    def __init__(
        self,
        tokenizer: SupportsDecode | None,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop texts need a tokenizer: give the engine one, or use stop_ids")
        self._text = None if tokenizer is None else Detokenizer(tokenizer, context, skip_special=skip_special)
        self._matcher = StopMatcher(stop, include_stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_sequence is not None

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.found

    def push(self, token: int, *, search: bool = True) -> str:
        """New text that later tokens cannot change; may be empty. Without `search` no stop string is looked for."""
        if self._text is None:
            return ""
        piece = self._text.push(token)
        return self._matcher.push(piece) if search else piece

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self._text is None or self.stopped:
            return ""
        return self._matcher.push(self._text.flush()) + self._matcher.flush()
