"""Log-probabilities as OpenAI writes them: tokens as text, where each begins, and what else was likely.

A token is shown by what it stands for (" the"), whatever stands before it; one that is a part of a character as its
bytes ("bytes:\\xe2\\x80"); a special one by its name ("<|endoftext|>"). Where a stop text cuts the answer, the tokens
that begin before the cut are kept. In a stream a token comes together with the text it is a part of: while that is
held back, as it may become a stop text or is half a character, so is the token.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from heedful.generate.detokenizer import Detokenizer
from heedful.generate.request import TokenScore
from heedful.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what OpenAI shows for the impossible: JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN is not above anything


# --- tokens as text -------------------------------------------------------------------------------------------------


class Spelling:
    """How the tokens of a tokenizer are shown; each is worked out once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = ref(tokenizer)  # which goes with its model
        self._names = {id: name for name, id in tokenizer.special_tokens.items()}
        self._said: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        # Some decoders show the first token of a text otherwise than the others ("the" for " the").
        self._before = [i for i in tokenizer.encode("a") if tokenizer.decode([i])]

    def text(self, id: int, partial: str = "bytes:") -> str:
        """What it stands for; `partial` goes before the bytes of a part of a character."""
        found = self._texts.get(id)
        if found is None:
            try:
                found = self.data(id).decode() or f"token_id:{id}"  # no token at all: a model's padding
            except UnicodeDecodeError:
                found = ""
            self._texts[id] = found
        return found or partial + "".join(f"\\x{byte:02x}" for byte in self.data(id))

    def data(self, id: int) -> bytes:
        """The same as bytes."""
        name = self._names.get(id)
        return self.said(id) if name is None else name.encode()

    def said(self, id: int) -> bytes:
        """What it adds to a text: nothing, if it is a special one."""
        found = self._said.get(id)
        if found is None:
            found = self._said[id] = b"" if id in self._names else self._work_out(id)
        return found

    def _work_out(self, id: int) -> bytes:
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        try:
            tokenizer.token(id)
        except ValueError:
            return b""
        try:
            return tokenizer.decode_bytes([id])
        except ValueError:  # a tokenizer without bytes
            before = tokenizer.decode(self._before)
            return tokenizer.decode([*self._before, id])[len(before) :].encode()


_spellings: WeakKeyDictionary[Tokenizer, Spelling] = WeakKeyDictionary()


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    if tokenizer not in _spellings:
        _spellings[tokenizer] = Spelling(tokenizer)
    return _spellings[tokenizer]


# --- where they stand -----------------------------------------------------------------------------------------------


class Places:
    """Where each token begins in a text, in characters; parts of a character begin where it does."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self.n = 0  # characters so far
        self._spelling = spelling_of(tokenizer)
        # Where bytes come out as they went in, reading them is the same and much faster.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.lossless else None
        self._text = Detokenizer(tokenizer, context) if self._utf8 is None else None

    def push(self, token: int) -> int:
        place = self.n
        if self._utf8 is not None:
            self.n += len(self._utf8.decode(self._spelling.said(token)))
        elif self._text is not None:
            self.n += len(self._text.push(token))
        return place

    def end(self) -> int:
        """The length of the whole, a broken character included."""
        if self._utf8 is not None:
            self.n += len(self._utf8.decode(b"", final=True))
        elif self._text is not None:
            self.n += len(self._text.flush())
        return self.n


@dataclass(frozen=True, slots=True)
class Entry:
    """A token in its place, and its score (the first one of a prompt has none)."""

    place: int
    token: int
    score: TokenScore | None


def prompt_entries(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenScore | None]) -> list[Entry]:
    places = Places(tokenizer)
    return [Entry(places.push(token), token, score) for token, score in zip(prompt, scores, strict=True)]


class Follower:
    """The tokens of one answer, let out with the text they are a part of; `start` characters stand before it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], start: int = 0) -> None:
        self._places = Places(tokenizer, prompt)
        self._start = start
        self._waiting: list[Entry] = []

    def push(self, token: int, score: TokenScore | None) -> None:
        self._waiting.append(Entry(self._start + self._places.push(token), token, score))

    def before(self, place: int) -> list[Entry]:
        """Those not let out yet that begin before this place in the text."""
        n = next((i for i, entry in enumerate(self._waiting) if entry.place >= place), len(self._waiting))
        out, self._waiting = self._waiting[:n], self._waiting[n:]
        return out

    def rest(self, place: int, end: TokenScore | None) -> list[Entry]:
        """The last ones, of a text that ends here; `end` is the stop token's."""
        whole = self._start + self._places.end() <= place  # no stop text cut it
        out = self._waiting if whole else self.before(place)
        return out if end is None else [*out, Entry(place, end.token, end)]


def answer_entries(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Sequence[int],
    scores: Sequence[TokenScore],
    *,
    start: int,
    stop: int,
    end: TokenScore | None,
) -> list[Entry]:
    """Those of a whole answer, which stands at start:stop of the text."""
    follower = Follower(tokenizer, prompt, start)
    for token, score in zip(tokens, scores, strict=True):
        follower.push(token, score)
    return follower.rest(stop, end)


# --- as JSON --------------------------------------------------------------------------------------------------------


def likely(score: TokenScore, spelling: Spelling) -> dict[str, float]:
    """The likeliest tokens by their text, the chosen one among them. Of two with the same text the likelier counts."""
    found: dict[str, float] = {}
    for id, logprob in (*score.top, (score.token, score.logprob)):
        text, logprob = spelling.text(id), finite(logprob)
        if logprob > found.get(text, -math.inf):
            found[text] = logprob
    return found


def completion_logprobs(entries: Sequence[Entry], spelling: Spelling) -> dict[str, Any]:
    scores = [entry.score for entry in entries]
    return {
        "tokens": [spelling.text(entry.token) for entry in entries],
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": [None if score is None else likely(score, spelling) for score in scores],
        "text_offset": [entry.place for entry in entries],
    }


def chat_logprobs(entries: Sequence[Entry], spelling: Spelling) -> dict[str, Any]:
    def shown(id: int, logprob: float) -> dict[str, Any]:
        token = spelling.text(id, partial="")  # as OpenAI's chats have it
        return {"token": token, "logprob": finite(logprob), "bytes": list(spelling.data(id))}

    content = []
    for entry in entries:
        assert entry.score is not None
        top = [shown(*pair) for pair in entry.score.top]
        content.append({**shown(entry.token, entry.score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}
