"""The whole words of a tokenizer's vocabulary, and a word as token ids."""

from __future__ import annotations

from functools import lru_cache

from heedful.text.byte_level import byte_level_bytes
from heedful.text.tokenizer import Tokenizer

SPACES = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write the space before a word


@lru_cache(maxsize=8)
def whole_words(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens that are words of their own, by id: neither special nor the middle of a word, with a letter or digit.

    A vocabulary that marks the begin of words has them where the mark is; of one that does not, all tokens count.
    """
    found: dict[int, str] = {}
    vocabulary = tokenizer.backend.get_vocab()
    pieces = {id: piece for piece, id in vocabulary.items() if id < tokenizer.vocab_size and piece}
    space = next((mark for mark in SPACES if any(piece[0] == mark and piece[1:] for piece in pieces.values())), "")
    for id, piece in sorted(pieces.items()):
        if piece in tokenizer.special_tokens or piece.startswith("##") or not piece.startswith(space):
            continue
        try:
            word = byte_level_bytes(piece).decode().strip() if space == "Ġ" else piece.removeprefix(space)
        except (UnicodeDecodeError, KeyError, ValueError):  # a part of a character; a token that was added later
            continue
        if any(character.isalnum() for character in word):
            found[id] = word
    return found


def word_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """The token ids of a word as it stands in a text, after a space where that makes a token of it. ValueError for a
    word that the tokenizer does not know."""
    after_space, alone = tokenizer.encode(f" {word}"), tokenizer.encode(word)
    ids = after_space if after_space and len(after_space) <= len(alone) else alone
    if not ids or tokenizer.unk_id in ids:
        raise ValueError(f"this model's vocabulary has no tokens for {word!r}")
    return ids
