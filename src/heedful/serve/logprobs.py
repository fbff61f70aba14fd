"""Log-probabilities in OpenAI's format: the text of each token, its offset, and the most likely alternatives.

A token is shown as its own text (" the"), independent of what precedes it; a part of a character as its bytes
("bytes:\\xe2\\x80"); a special token by its name ("<|endoftext|>"). Where a stop string truncates the answer, the
tokens that begin before it are kept. In a stream a token is sent together with its text: as long as that is held back,
because it may become a stop string or is half a character, so is the token.
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

MIN_LOGPROB = -9999.0  # what OpenAI shows for the impossible: JSON has no infinity


def clamp_logprob(logprob: float) -> float:
    """The log-probability as a number that JSON has; NaN becomes the lowest."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


# --- tokens as text -------------------------------------------------------------------------------------------------


class TokenText:
    """The text and bytes of a tokenizer's tokens, each computed once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = ref(tokenizer)  # freed with its model
        self._names = {id: name for name, id in tokenizer.special_tokens.items()}
        self._output: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        # Some decoders strip the space before the first token of a text ("the" for " the").
        self._context = [i for i in tokenizer.encode("a") if tokenizer.decode([i])]

    def text(self, id: int, partial: str = "bytes:") -> str:
        """The token's text, or its bytes after the prefix `partial` if it is a part of a character."""
        found = self._texts.get(id)
        if found is None:
            try:
                found = self.raw_bytes(id).decode() or f"token_id:{id}"  # no token at all: a model's padding
            except UnicodeDecodeError:
                found = ""
            self._texts[id] = found
        return found or partial + "".join(f"\\x{byte:02x}" for byte in self.raw_bytes(id))

    def raw_bytes(self, id: int) -> bytes:
        """The token's bytes; of a special token, those of its name."""
        name = self._names.get(id)
        return self.output_bytes(id) if name is None else name.encode()

    def output_bytes(self, id: int) -> bytes:
        """What the token adds to the decoded text: nothing, if it is special."""
        found = self._output.get(id)
        if found is None:
            found = self._output[id] = b"" if id in self._names else self._decode(id)
        return found

    def _decode(self, id: int) -> bytes:
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        try:
            tokenizer.token(id)
        except ValueError:
            return b""
        try:
            return tokenizer.decode_bytes([id])
        except ValueError:  # a tokenizer without bytes
            before = tokenizer.decode(self._context)
            return tokenizer.decode([*self._context, id])[len(before) :].encode()


_token_texts: WeakKeyDictionary[Tokenizer, TokenText] = WeakKeyDictionary()


def token_text_of(tokenizer: Tokenizer) -> TokenText:
    """The tokenizer's TokenText, one for all requests."""
    if tokenizer not in _token_texts:
        _token_texts[tokenizer] = TokenText(tokenizer)
    return _token_texts[tokenizer]


# --- offsets ----------------------------------------------------------------------------------------------------------


class TextOffsets:
    """The offset of each token in the decoded text, in characters; parts of a character have the offset of it."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self.n_chars = 0
        token_text = token_text_of(tokenizer)
        self._token_bytes = token_text.output_bytes if skip_special else token_text.raw_bytes
        # Where the tokenizer reproduces bytes exactly, decoding those gives the same and is much faster.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.lossless else None
        self._detokenizer = None if tokenizer.lossless else Detokenizer(tokenizer, context, skip_special=skip_special)

    def push(self, token: int) -> int:
        """Append a token; returns its offset."""
        offset = self.n_chars
        if self._utf8 is not None:
            self.n_chars += len(self._utf8.decode(self._token_bytes(token)))
        elif self._detokenizer is not None:
            self.n_chars += len(self._detokenizer.push(token))
        return offset

    def finish(self) -> int:
        """The length of the whole text, including an incomplete character at its end."""
        if self._utf8 is not None:
            self.n_chars += len(self._utf8.decode(b"", final=True))
        elif self._detokenizer is not None:
            self.n_chars += len(self._detokenizer.flush())
        return self.n_chars


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its offset and its score (the first token of a prompt has none)."""

    offset: int
    token: int
    score: TokenScore | None


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenScore | None]
) -> list[TokenLogprob]:
    """The tokens of an echoed prompt."""
    offsets = TextOffsets(tokenizer)
    return [TokenLogprob(offsets.push(token), token, score) for token, score in zip(prompt, scores, strict=True)]


class LogprobBuffer:
    """The tokens of one answer, held back until their text is sent; the answer begins at offset `start`."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], start: int = 0, *, skip_special: bool = True
    ) -> None:
        self._offsets = TextOffsets(tokenizer, prompt, skip_special=skip_special)
        self._start = start
        self._pending: list[TokenLogprob] = []

    def push(self, token: int, score: TokenScore | None) -> None:
        """Append a token."""
        self._pending.append(TokenLogprob(self._start + self._offsets.push(token), token, score))

    def release(self, n_chars: int) -> list[TokenLogprob]:
        """The pending tokens that begin within the first n_chars of the text."""
        n = next((i for i, entry in enumerate(self._pending) if entry.offset >= n_chars), len(self._pending))
        released, self._pending = self._pending[:n], self._pending[n:]
        return released

    def finish(self, n_chars: int, end: TokenScore | None) -> list[TokenLogprob]:
        """The last tokens of a text of n_chars; `end` is the score of the stop token, if it is wanted."""
        whole = self._start + self._offsets.finish() <= n_chars  # no stop string truncated it
        released = self._pending if whole else self.release(n_chars)
        return released if end is None else [*released, TokenLogprob(n_chars, end.token, end)]


def answer_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Sequence[int],
    scores: Sequence[TokenScore],
    *,
    start: int,
    stop: int,
    end: TokenScore | None,
    skip_special: bool = True,
) -> list[TokenLogprob]:
    """The tokens of a complete answer, which is text[start:stop]; `end` as in LogprobBuffer.finish."""
    buffer = LogprobBuffer(tokenizer, prompt, start, skip_special=skip_special)
    for token, score in zip(tokens, scores, strict=True):
        buffer.push(token, score)
    return buffer.finish(stop, end)


# --- JSON -------------------------------------------------------------------------------------------------------------


def top_logprobs(score: TokenScore, token_text: TokenText) -> dict[str, float]:
    """The most likely tokens by their text, the chosen one included; of two with one text, the more likely."""
    found: dict[str, float] = {}
    for id, logprob in (*score.top, (score.token, score.logprob)):
        text, logprob = token_text.text(id), clamp_logprob(logprob)
        if logprob > found.get(text, -math.inf):
            found[text] = logprob
    return found


def completion_logprobs(entries: Sequence[TokenLogprob], token_text: TokenText) -> dict[str, Any]:
    """The `logprobs` of a completion: parallel lists."""
    scores = [entry.score for entry in entries]
    return {
        "tokens": [token_text.text(entry.token) for entry in entries],
        "token_logprobs": [None if score is None else clamp_logprob(score.logprob) for score in scores],
        "top_logprobs": [None if score is None else top_logprobs(score, token_text) for score in scores],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenLogprob], token_text: TokenText) -> dict[str, Any]:
    """The `logprobs` of a chat completion: an object per token."""

    def describe(id: int, logprob: float) -> dict[str, Any]:
        token = token_text.text(id, partial="")  # without a prefix, as OpenAI's chats have it
        return {"token": token, "logprob": clamp_logprob(logprob), "bytes": list(token_text.raw_bytes(id))}

    content = []
    for entry in entries:
        assert entry.score is not None
        top = [describe(*pair) for pair in entry.score.top]
        content.append({**describe(entry.token, entry.score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}
