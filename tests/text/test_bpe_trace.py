"""The blackboard example, and that merging loses nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.text import trace_merges


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
