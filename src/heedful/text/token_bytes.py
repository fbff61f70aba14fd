"""What every token of a vocabulary adds to a text, in bytes: for grammars, which work on text and not on tokens."""

from __future__ import annotations

from functools import lru_cache

from heedful.text.byte_level import byte_fallback_bytes, byte_level_bytes
from heedful.text.tokenizer import Tokenizer

END_OF_WORD = "</w>"  # GPT-1's, after which there is a space


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """The bytes that each token adds to a text that stands before it; none where an id has no token, and of a special
    token its name. ValueError for a tokenizer whose tokens have no text of their own.

    At the begin of a text the decoder may leave out the space of its first token, see `strips_first_space`.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    pieces = [tokenizer.backend.id_to_token(index) for index in range(tokenizer.vocab_size)]
    texts = [
        b"" if piece is None or index in added else _bytes(tokenizer, index, piece)
        for index, piece in enumerate(pieces)
    ]
    ordinary = [index for index, text in enumerate(texts) if text]
    if not tokenizer.knows_bytes and ordinary:
        whole = tokenizer.decode([ordinary[0], *ordinary]).encode()
        if whole.rstrip() != (_first(tokenizer, ordinary[0]) + b"".join(texts[i] for i in ordinary)).rstrip():
            raise ValueError(
                "the text of this model's tokens depends on those around them, as with BERT's tokenizer: "
                "it cannot be held to a schema or a grammar"
            )
    for index, token in added.items():
        if index < len(texts):
            texts[index] = token.content.encode()
    return tuple(texts)


def _bytes(tokenizer: Tokenizer, index: int, piece: str) -> bytes:
    if tokenizer.knows_bytes:
        return byte_level_bytes(piece) if tokenizer.byte_scheme == "level" else byte_fallback_bytes(piece)
    if piece.endswith(END_OF_WORD):
        return piece.removesuffix(END_OF_WORD).encode() + b" "
    first = _first(tokenizer, index)
    return tokenizer.decode([index, index]).encode()[len(first) :]


def _first(tokenizer: Tokenizer, index: int) -> bytes:
    text = tokenizer.decode([index]).encode()
    return text + b" " if tokenizer.token(index).endswith(END_OF_WORD) else text


@lru_cache(maxsize=8)
def strips_first_space(tokenizer: Tokenizer) -> bool:
    """Whether a text's first token loses its space when it is decoded, as SentencePiece's "▁the" does."""
    special = set(tokenizer.special_tokens.values())
    texts = enumerate(token_bytes(tokenizer))
    spaced = next((i for i, text in texts if text[:1] == b" " and text.strip() and i not in special), None)
    return spaced is not None and not tokenizer.decode([spaced]).startswith(" ")
