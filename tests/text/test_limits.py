"""Texts that are refused by their characters, before they are tokenized."""

import pytest

import heedful
from heedful.loaded import Loaded
from heedful.text import train_bpe, train_wordpiece
from heedful.text.limits import ALWAYS_TOKENIZED, TextTooLong, check_characters
from heedful.text.tokenizer import Tokenizer
from support.folders import tiny_gpt
from support.serving import CHATML

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


def test_of_a_long_prompt_that_is_truncated_the_end_alone_is_tokenized(monkeypatch):
    tokenizer = train_bpe(CORPUS, 300, special=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML
    loaded = Loaded(tiny_gpt(vocab_size=len(tokenizer)), tokenizer, "tiny")
    text = "".join(f"the lazy dog {i} <|im_end|>" for i in range(4000))
    lengths, encode = [], Tokenizer._encode

    def counted(self: Tokenizer, text: str, *rest: object, **named: object) -> object:
        lengths.append(len(text))
        return encode(self, text, *rest, **named)

    whole = tokenizer.encode(text)
    chat = tokenizer.chat([{"role": "user", "content": text}])
    monkeypatch.setattr(Tokenizer, "_encode", counted)
    assert loaded.encode_prompt(text, truncate_prompt_tokens=50) == (tuple(whole[-50:]), None)
    assert loaded.encode_prompt(text, chat=True, truncate_prompt_tokens=50) == (tuple(chat[-50:]), None)
    assert lengths and max(lengths) <= 50 * tokenizer.longest_piece + ALWAYS_TOKENIZED < len(text)
