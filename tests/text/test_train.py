"""Training new tokenizers."""

import pytest

from heedful.text import byte_tokens, characters, train_bpe, train_unigram, train_wordpiece, words


def test_bpe_learns_the_words_of_its_text(corpus):
    tokenizer = train_bpe(iter(corpus), 400)
    assert len(tokenizer) <= 400
    assert len(tokenizer.encode("it was the best of times")) <= 8
    assert tokenizer.eos_id == len(tokenizer) - 1
    assert train_bpe(corpus, 400).backend.to_str() == tokenizer.backend.to_str()


def test_bpe_without_any_text_is_bytes():
    tokenizer = train_bpe([], 1000)
    assert len(tokenizer) == 257 and tokenizer.lossless
    assert len(tokenizer.encode("é")) == 2


def test_wordpiece(corpus):
    tokenizer = train_wordpiece(iter(corpus), 200)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    assert tokenizer.decode(tokenizer.encode("The Best", add_special=True)) == "the best"
    assert train_wordpiece(corpus, 200, lower_case=False).decode([]) == ""


def test_unigram(corpus):
    tokenizer = train_unigram(iter(corpus), 200, special=["<extra_id_0>"])
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    assert tokenizer.decode(tokenizer.encode("it was the best", add_special=True)) == "it was the best"
    assert tokenizer.encode("a", add_special=True)[-1] == 1


def test_words():
    tokenizer = words(["a b b, c c c", "C!"], special=["<pad>", "<unk>"])
    assert [tokenizer.token(index) for index in range(len(tokenizer))] == [
        "<pad>",
        "<unk>",
        "c",
        "b",
        "!",
        ",",
        "C",
        "a",
    ]
    assert tokenizer.decode(tokenizer.encode("c, b!")) == "c , b !"
    assert tokenizer.encode("unseen") == [tokenizer.unk_id]
    assert len(words(["a b b c c c"], 6)) == 6
    assert words(["A a"], lower_case=True).encode("A") == words(["A a"], lower_case=True).encode("a")


def test_characters():
    tokenizer = characters(["hello\n wörld 👍"])
    for text in ("hello\n", "  w\n\nö 👍", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.encode("hxz") == [tokenizer.id("h"), tokenizer.unk_id, tokenizer.unk_id]
    assert not tokenizer.lossless


def test_bytes():
    tokenizer = byte_tokens()
    assert len(tokenizer) == 259 and len(byte_tokens(extra=125)) == 384
    assert tokenizer.encode("aé", add_special=True) == [100, 198, 172, 1]
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(bytes(range(256)))) == bytes(range(256))


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: train_bpe("one text", 300), r"pass \[text\]"),
        (lambda: train_bpe([b"bytes"], 300), "got bytes"),
        (lambda: train_bpe(["a"], 100), "at least 257"),
        (lambda: train_bpe(["a"], 300, pattern="gpt7"), "unknown pattern"),
        (lambda: train_wordpiece(["a"], 3), "at least 6"),
        (lambda: train_unigram(["a"], 2), "at least 4"),
        (lambda: words(["a"], special=["<pad>"]), "<unk>"),
        (lambda: characters(["a"], 2), "at least 5"),
    ],
)
def test_what_cannot_be_trained(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_an_error_while_reading_the_texts_is_the_callers_own():
    def broken():
        yield "fine"
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        train_bpe(broken(), 300)


@pytest.mark.parametrize("text", ["a" * 200_000, "\0" * 200_000, " " * 200_000], ids=["letters", "NULs", "spaces"])
@pytest.mark.parametrize("train", [train_bpe, train_wordpiece])
def test_a_long_text_without_a_space_is_trained_on(train, text):
    """No wall clock: in one word the library takes time quadratic in its length, here about two minutes."""
    assert 5 <= len(train([text], 300)) <= 300
