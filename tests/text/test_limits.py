"""Texts that are refused by their characters, before they are tokenized."""

import pytest

import heedful
from heedful.loaded import Loaded
from heedful.text import train_bpe, train_wordpiece
from heedful.text.limits import ALWAYS_TOKENIZED, TextTooLong, check_characters
from heedful.text.tokenizer import Tokenizer
from support.folders import tiny_gpt

CORPUS = ["the quick brown fox jumps over the lazy dog"] * 3


def test_no_text_is_refused_that_could_fit():
    """Of a lossless tokenizer the longest text of n tokens is n times its longest piece."""
    tokenizer = train_bpe(CORPUS, 300)
    assert tokenizer.longest_piece == max(len(tokenizer.token(i)) for i in range(len(tokenizer)))
    n = 2 * ALWAYS_TOKENIZED // tokenizer.longest_piece
    check_characters(tokenizer, ["x" * (n * tokenizer.longest_piece)], n)
    with pytest.raises(TextTooLong, match="tokens of this model's context are at most"):
        check_characters(tokenizer, ["x" * (n * tokenizer.longest_piece), "x"], n)
    check_characters(tokenizer, ["x" * 10**7], None)


def test_a_long_prompt_is_refused_without_being_tokenized(monkeypatch):
    tokenizer = train_wordpiece(CORPUS, 60)
    loaded = Loaded(tiny_gpt(), tokenizer, "tiny")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "_encode", never)
    with pytest.raises(TextTooLong, match="the text has 8,000,000 characters"):
        loaded.generate("the dog " * 10**6)
    with pytest.raises(TextTooLong):
        loaded.complete([{"role": "user", "content": "the dog " * 10**6}], chat=True)
    monkeypatch.setattr(Tokenizer, "encode_batch", never)
    with pytest.raises(TextTooLong):
        heedful.load("bert-books").embed("the dog " * 10**6)
