"""The blackboard example, and that merging loses nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.text import byte_tokens, learned_merges, trace_merges, trace_tokenizer, train_bpe, words
from heedful.text.backends import gpt1
from heedful.text.tokenizer import Tokenizer


def test_the_lecture_example():
    trace = trace_merges("aaabdaaabac")
    assert [(merge.symbol, "".join(merge.pair), merge.text) for merge in trace.merges] == [
        ("Z", "aa", "ZabdZabac"),
        ("Y", "ab", "ZYdZYac"),
        ("X", "ZY", "XdXac"),
    ]
    assert trace.text == "XdXac"
    assert str(trace).splitlines()[1] == "Z=aa\tZabdZabac"


def test_the_number_of_merges_can_be_limited():
    assert trace_merges("aaabdaaabac", max_merges=1).text == "ZabdZabac"
    assert trace_merges("aaabdaaabac", max_merges=0).text == "aaabdaaabac"
    with pytest.raises(ValueError, match="negative"):
        trace_merges("a", max_merges=-1)


def test_symbols_of_the_text_are_not_taken_twice():
    trace = trace_merges("ZZZZ abab")
    assert "Z" not in {merge.symbol for merge in trace.merges}
    assert trace.expand() == "ZZZZ abab"


@given(st.text(alphabet="abZ Σ\n", max_size=80))
@settings(deadline=None, max_examples=60)
def test_expanding_gives_the_text_back_and_every_merge_pays(text):
    trace = trace_merges(text)
    assert trace.expand() == text
    before = text
    for merge in trace.merges:
        assert len(before) - len(merge.text) == merge.count >= 2
        before = merge.text


@pytest.mark.parametrize("text", ["", "a", "abc"])
def test_nothing_to_merge(text):
    assert trace_merges(text).merges == ()
    assert trace_merges(text).text == text


@pytest.mark.parametrize("pattern", ["gpt2", "llama3"])
def test_a_trained_tokenizer_merges_word_by_word(corpus, nasty, pattern):
    """The pieces after the last merge are the library's tokens."""
    tokenizer = train_bpe(corpus, 400, pattern=pattern)
    for text in nasty:
        pieces = [piece for word in trace_tokenizer(tokenizer, text) for piece in word.pieces]
        assert pieces == [tokenizer.token(id) for id in tokenizer.encode(text)], text


def test_a_word_shows_the_rank_of_every_merge():
    vocab = {piece: i for i, piece in enumerate(["<unk>", "l", "o", "w", "w</w>", "lo", "low</w>"])}
    tokenizer = Tokenizer(gpt1(vocab, [("l", "o"), ("lo", "w</w>")])[0])
    (word,) = trace_tokenizer(tokenizer, "LOW")
    assert word.symbols == ("l", "o", "w</w>") and word.merges == ((0, ("lo", "w</w>")), (1, ("low</w>",)))
    assert str(word).splitlines() == ["         l o w</w>", "      1  lo w</w>", "      2  low</w>"]


def test_other_tokenizers_have_no_merges():
    with pytest.raises(ValueError, match="a WordLevel has no merges"):
        learned_merges(words(["a b"]))
    with pytest.raises(ValueError, match="bytes has no merges"):
        learned_merges(byte_tokens())
