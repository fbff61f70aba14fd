"""Text as it comes: whole characters, stop texts wherever the tokens break, and nothing lost."""

from __future__ import annotations

import random

import pytest

from heedful.generate.detokenizer import Detokenizer, StopMatcher, StoppingDetokenizer, stream_pieces
from heedful.text import byte_tokens, train_bpe, train_wordpiece

TEXT = "naïve 日本語 👩‍👩‍👧 the unplayable player's replaying, played and prayed. Ünïcödé END"


def by_hand(text: str, stops: list[str]) -> tuple[str, str | None]:
    """One character at a time, the plainest way."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def in_parts(text: str, chance: random.Random) -> list[str]:
    parts = []
    while text:
        n = chance.randint(0, 4)
        parts.append(text[:n])
        text = text[n:]
    return parts


def test_stop_texts_are_found_whatever_the_pieces():
    chance = random.Random(0)
    n_found = 0
    for _ in range(3000):
        text = "".join(chance.choices("ab\n", k=chance.randint(0, 14)))
        stops = ["".join(chance.choices("ab\n", k=chance.randint(1, 4))) for _ in range(chance.randint(0, 3))]
        matcher, shown = StopMatcher(stops), ""
        for part in in_parts(text, chance):
            shown += matcher.push(part)
            assert not any(stop in shown for stop in stops)
        shown += matcher.flush() if not matcher.found else ""
        assert (shown, matcher.found) == by_hand(text, stops)
        n_found += matcher.found is not None
    assert 500 < n_found < 2900


def test_only_what_may_become_a_stop_text_waits():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(p) for p in ("Hello\n", "there\n", "\nUs", "e", "d")] == [
        "Hello",
        "\nthere",
        "",
        "",
        "\n\nUsed",
    ]
    assert matcher.push("\n\n") == "" and matcher.flush() == "\n\n"


@pytest.fixture(scope="module")
def tokenizers():
    corpus = [TEXT, "play player played playing replay pray prayed unable able ing ed s"] * 20
    return {
        "bytes": byte_tokens(),
        "bpe": train_bpe(corpus, 300),
        "wordpiece": train_wordpiece(corpus, 120),
    }


@pytest.mark.parametrize("kind", ["bytes", "bpe", "wordpiece"])
def test_joined_pieces_equal_the_whole(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(TEXT)
    parts = list(stream_pieces(ids, tokenizer))
    assert "".join(parts) == tokenizer.decode(ids)
    assert len(parts) > 10 and not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "wordpiece"])
def test_an_answer_goes_on_from_its_prompt(tokenizers, kind):
    """The text of the new tokens is what they add to the prompt's: the space before a word, a word's end."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(TEXT)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        text = Detokenizer(tokenizer, ids[:cut])
        assert before + "".join(text.push(i) for i in ids[cut:]) + text.flush() == tokenizer.decode(ids)


def test_a_broken_character_is_shown_at_the_end_alone():
    tokenizer = byte_tokens()
    text = Detokenizer(tokenizer)
    whole = tokenizer.encode("日")
    assert [text.push(i) for i in whole] == ["", "", "日"]
    assert [text.push(i) for i in whole[:2]] == ["", ""]
    assert text.flush() == tokenizer.decode(whole[:2])
    inside = Detokenizer(tokenizer, whole[:1])  # the prompt ends inside a character
    assert inside.push(tokenizer.encode("a")[0]) == "a"


def test_tokens_without_text_do_not_disturb(tokenizers):
    tokenizer = tokenizers["wordpiece"]
    special = next(iter(tokenizer.special_tokens.values()))
    ids = tokenizer.encode("play playing")
    mixed = [ids[0], special, *ids[1:], special]
    assert "".join(stream_pieces(mixed, tokenizer)) == tokenizer.decode(mixed)


@pytest.mark.parametrize("stop", ["本", "ay", "e the", "END", "plays", "D"])
def test_a_writer_ends_before_the_stop_text(tokenizers, stop):
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(TEXT)
        writer = StoppingDetokenizer(tokenizer, [stop])
        text = ""
        for token in ids:
            text += writer.push(token)
            if writer.stopped:
                break
        text += writer.flush()
        whole = tokenizer.decode(ids)
        assert text == whole.partition(stop)[0] and writer.stopped == (stop in whole)


def test_without_a_tokenizer_there_is_no_text():
    writer = StoppingDetokenizer(None)
    assert (writer.push(3), writer.flush(), writer.stopped) == ("", "", False)
    with pytest.raises(ValueError, match="stop_ids"):
        StoppingDetokenizer(None, ["x"])
