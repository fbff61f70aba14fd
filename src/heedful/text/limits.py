"""How long a text may be, by its characters: told before it is tokenized, which takes a second per few 100,000."""

from __future__ import annotations

from collections.abc import Iterable

from heedful.text.tokenizer import Tokenizer

ALWAYS_TOKENIZED = 2**16  # characters: so many are tokenized in no time
# Of a tokenizer that is not lossless, a token may be an unknown word, which is longer than all pieces, and whitespace
# may be no token at all. BERT's unknown words have at most 100 characters, or are longer than any word.
UNKNOWN_WORD = 128


class TextTooLong(ValueError):
    """A text has more characters than the tokens of a context can have."""


def check_characters(tokenizer: Tokenizer, texts: Iterable[str], context_length: int | None) -> None:
    """TextTooLong if texts have more characters together than fit into the context, whatever their tokens are."""
    if context_length is None:
        return
    n, most = sum(map(len, texts)), max(ALWAYS_TOKENIZED, context_length * _longest_token(tokenizer))
    if n > most:
        raise TextTooLong(
            f"the text has {n:,} characters, and the {context_length:,} tokens of this model's context are at most "
            f"{most:,}: shorten it"
        )


def characters_for(tokenizer: Tokenizer, n_tokens: int) -> int:
    """How many characters at the end of a text are tokenized to have its last tokens: what those have at most, and some
    before them, where the cut may change tokens."""
    return n_tokens * _longest_token(tokenizer) + ALWAYS_TOKENIZED


def _longest_token(tokenizer: Tokenizer) -> int:
    return tokenizer.longest_piece if tokenizer.lossless else max(tokenizer.longest_piece, UNKNOWN_WORD)
