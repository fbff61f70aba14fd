"""Text that a tokenizer's vocabulary does not cover: how much of it, and a warning.

A model reads such text as unknown tokens ([UNK]), or not at all, and its result says little about the text. A
vocabulary with a token for every byte covers everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from heedful.text.tokenizer import Tokenizer
from heedful.text.warn import warn

SAMPLE = 4096  # characters of a text that are looked at
FEW = 40  # tokens of a vocabulary that is listed
TOO_MANY = 0.5  # the share of a text's characters from which a result says little


class UnknownTextWarning(UserWarning):
    """Most of a text has no tokens but unknown ones."""


def unknown_share(tokenizer: Tokenizer, text: str) -> float:
    """The share of a text's characters, whitespace aside, that are in no token or in unknown ones."""
    return _unknown_share(tokenizer, text)[0]


def _unknown_share(tokenizer: Tokenizer, text: str) -> tuple[float, str]:
    """The share, and the first word with a character that is not covered."""
    text = text[:SAMPLE]
    if tokenizer.knows_bytes or not text.strip():
        return 0.0, ""
    known = [character.isspace() for character in text]
    n_spaces = sum(known)
    tokens = tokenizer.encode_with_offsets(text)
    # Unknown ones last: the "▁" that SentencePiece puts before a word shares the offsets of its first character.
    for id, begin, end in sorted(tokens, key=lambda token: token[0] == tokenizer.unk_id):
        known[begin:end] = [id != tokenizer.unk_id] * (end - begin)
    n_unknown = known.count(False)
    first = text[known.index(False) :].split()[0] if n_unknown else ""
    return n_unknown / (len(text) - n_spaces), first


def few_symbols(tokenizer: Tokenizer) -> list[str]:
    """All that a tokenizer of few symbols reads, as that of a model for sums; [] for others."""
    if len(tokenizer) > FEW:
        return []
    pieces = tokenizer.backend.get_vocab()
    symbols = [piece for piece in sorted(pieces, key=lambda p: (len(p), p)) if piece not in tokenizer.special_tokens]
    return [] if any(character.isalpha() for piece in symbols for character in piece) else symbols


def warn_if_unknown(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Warn of the first text that the vocabulary does not cover by half; of one of few symbols, that has another."""
    for text in texts:
        share, example = _unknown_share(tokenizer, text)
        if share and (symbols := few_symbols(tokenizer)) and tokenizer.unk_id in tokenizer.encode(text[:SAMPLE]):
            warn(
                f"this model reads only {' '.join(symbols)}, and {example[:20]!r} is not among them", UnknownTextWarning
            )
            return
        if share >= TOO_MANY:
            warn(
                f"the model's vocabulary has no tokens for {share:.0%} of this text, as {example[:20]!r}: the result "
                "says little about it; use a model for its language or script",
                UnknownTextWarning,
            )
            return
