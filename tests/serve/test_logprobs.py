"""From the engine's results to OpenAI's words: tokens as text, their offsets, and requests in subrequests."""

from __future__ import annotations

import random

import pytest

import heedful
from heedful.generate.request import TokenScore
from heedful.serve.logprobs import (
    LogprobBuffer,
    TextOffsets,
    TokenText,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    top_logprobs,
)
from heedful.text.tokenizer import Tokenizer
from support.serving import shared_data, words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return words()


def test_a_token_is_shown_by_what_it_stands_for(tokenizer):
    token_text = TokenText(tokenizer)
    for id in range(len(tokenizer)):
        data = tokenizer.decode_bytes([id]) or tokenizer.token(id).encode()
        assert token_text.raw_bytes(id) == data
        text = token_text.text(id)
        if text.startswith("bytes:"):
            assert text[6:] == token_text.text(id, partial="") == "".join(f"\\x{byte:02x}" for byte in data)
        else:
            assert text.encode() == data
    assert token_text.text(len(tokenizer) + 5) == f"token_id:{len(tokenizer) + 5}"  # a model's padding


def test_tokenizers_without_bytes_show_the_space_before_a_word():
    for name in ("bert-books", "shakespeare"):
        tokenizer = heedful.load(name).tokenizer
        ids = tokenizer.encode("the king speaks")
        joined = "".join(TokenText(tokenizer).text(id) for id in ids)
        assert joined.strip() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["words", "bert-books", "shakespeare", "gpt2"])
def test_places_are_those_of_the_text(name):
    """Of random ids, whole characters or not."""
    if name == "gpt2":
        tokenizer = Tokenizer.from_folder(shared_data("gpt2-tokenizer"))
    else:
        tokenizer = words() if name == "words" else heedful.load(name).tokenizer
    chance = random.Random(1)
    for _ in range(30):
        ids = [chance.randrange(len(tokenizer)) for _ in range(20)]
        offsets = TextOffsets(tokenizer)
        starts = [offsets.push(id) for id in ids]
        assert starts == sorted(starts) and starts[0] == 0
        assert offsets.finish() == len(tokenizer.decode(ids))


def score(token: int, logprob: float, *top: tuple[int, float]) -> TokenScore:
    return TokenScore(token, logprob, top)


def test_the_chosen_token_is_always_among_the_likely(tokenizer):
    token_text = TokenText(tokenizer)
    a, b, c = (token_text.text(id) for id in (64, 65, 66))
    assert top_logprobs(score(66, -3.0, (64, -1.0), (65, -2.0)), token_text) == {a: -1.0, b: -2.0, c: -3.0}
    assert top_logprobs(score(64, -1.0, (64, -1.0), (65, -2.0)), token_text) == {a: -1.0, b: -2.0}
    assert top_logprobs(score(66, float("-inf"), (64, float("nan"))), token_text) == {a: -9999.0, c: -9999.0}


def test_of_two_tokens_with_one_text_the_likelier_counts(tokenizer):
    token_text = TokenText(tokenizer)
    token_text._texts[64] = token_text._texts[65] = "same"
    assert top_logprobs(score(65, -2.0, (64, -1.0)), token_text) == {"same": -1.0}


def test_parts_of_a_character_begin_where_it_does(tokenizer):
    ids = tokenizer.encode_bytes("a👍b".encode())
    assert len(ids) > 3
    entries = prompt_logprobs(tokenizer, ids, [None] * len(ids))
    assert [entry.offset for entry in entries] == [0] + [1] * (len(ids) - 2) + [2]
    assert completion_logprobs(entries, TokenText(tokenizer))["text_offset"] == [e.offset for e in entries]


def test_tokens_wait_for_the_text_they_are_a_part_of(tokenizer):
    ids = tokenizer.encode_bytes("a👍b".encode())
    buffer = LogprobBuffer(tokenizer, (), start=10)
    counts = []
    for id, written in zip(ids, [11] * (len(ids) - 2) + [12, 13], strict=True):
        buffer.push(id, score(id, -1.0))
        counts.append(len(buffer.release(written)))
    assert counts == [1] + [0] * (len(ids) - 3) + [len(ids) - 2, 1]
    (end,) = buffer.finish(13, score(tokenizer.eos_id, -0.5))
    assert (end.offset, end.token) == (13, tokenizer.eos_id)


def test_a_chat_shows_bytes(tokenizer):
    token_text = TokenText(tokenizer)
    half = tokenizer.encode_bytes("é".encode()[:1])[0]
    (entry,) = chat_logprobs(prompt_logprobs(tokenizer, [half], [score(half, -1.0, (half, -1.0))]), token_text)[
        "content"
    ]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\\xc3", [0xC3], -1.0)
    assert entry["top_logprobs"] == [{"token": "\\xc3", "logprob": -1.0, "bytes": [0xC3]}]
