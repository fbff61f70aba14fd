"""From the engine's results to OpenAI's words: tokens as text, their places, and requests in parts."""

from __future__ import annotations

import random

import pytest

import heedful
from heedful.generate.request import Sampling, TokenScore
from heedful.loaded import Loaded
from heedful.serve.asks import Ask, parts_of
from heedful.serve.logprobs import (
    Follower,
    Places,
    Spelling,
    chat_logprobs,
    completion_logprobs,
    likely,
    prompt_entries,
)
from heedful.serve.worker import Worker
from heedful.text.tokenizer import Tokenizer
from support.folders import tiny_gpt
from support.serving import shared_data, words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return words()


def test_a_token_is_shown_by_what_it_stands_for(tokenizer):
    spelling = Spelling(tokenizer)
    for id in range(len(tokenizer)):
        data = tokenizer.decode_bytes([id]) or tokenizer.token(id).encode()
        assert spelling.data(id) == data
        text = spelling.text(id)
        if text.startswith("bytes:"):
            assert text[6:] == spelling.text(id, partial="") == "".join(f"\\x{byte:02x}" for byte in data)
        else:
            assert text.encode() == data
    assert spelling.text(len(tokenizer) + 5) == f"token_id:{len(tokenizer) + 5}"  # a model's padding


def test_tokenizers_without_bytes_show_the_space_before_a_word():
    for name in ("bert-books", "shakespeare"):
        tokenizer = heedful.load(name).tokenizer
        ids = tokenizer.encode("the king speaks")
        spelled = "".join(Spelling(tokenizer).text(id) for id in ids)
        assert spelled.strip() == tokenizer.decode(ids)


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
        places = Places(tokenizer)
        starts = [places.push(id) for id in ids]
        assert starts == sorted(starts) and starts[0] == 0
        assert places.end() == len(tokenizer.decode(ids))


def score(token: int, logprob: float, *top: tuple[int, float]) -> TokenScore:
    return TokenScore(token, logprob, top)


def test_the_chosen_token_is_always_among_the_likely(tokenizer):
    spelling = Spelling(tokenizer)
    a, b, c = (spelling.text(id) for id in (64, 65, 66))
    assert likely(score(66, -3.0, (64, -1.0), (65, -2.0)), spelling) == {a: -1.0, b: -2.0, c: -3.0}
    assert likely(score(64, -1.0, (64, -1.0), (65, -2.0)), spelling) == {a: -1.0, b: -2.0}
    assert likely(score(66, float("-inf"), (64, float("nan"))), spelling) == {a: -9999.0, c: -9999.0}


def test_of_two_tokens_with_one_text_the_likelier_counts(tokenizer):
    spelling = Spelling(tokenizer)
    spelling._texts[64] = spelling._texts[65] = "same"
    assert likely(score(65, -2.0, (64, -1.0)), spelling) == {"same": -1.0}


def test_parts_of_a_character_begin_where_it_does(tokenizer):
    ids = tokenizer.encode_bytes("a👍b".encode())
    assert len(ids) > 3
    entries = prompt_entries(tokenizer, ids, [None] * len(ids))
    assert [entry.place for entry in entries] == [0] + [1] * (len(ids) - 2) + [2]
    assert completion_logprobs(entries, Spelling(tokenizer))["text_offset"] == [e.place for e in entries]


def test_tokens_wait_for_the_text_they_are_a_part_of(tokenizer):
    ids = tokenizer.encode_bytes("a👍b".encode())
    follower = Follower(tokenizer, (), start=10)
    counts = []
    for id, written in zip(ids, [11] * (len(ids) - 2) + [12, 13], strict=True):
        follower.push(id, score(id, -1.0))
        counts.append(len(follower.before(written)))
    assert counts == [1] + [0] * (len(ids) - 3) + [len(ids) - 2, 1]
    (end,) = follower.rest(13, score(tokenizer.eos_id, -0.5))
    assert (end.place, end.token) == (13, tokenizer.eos_id)


def test_a_chat_shows_bytes(tokenizer):
    spelling = Spelling(tokenizer)
    half = tokenizer.encode_bytes("é".encode()[:1])[0]
    (entry,) = chat_logprobs(prompt_entries(tokenizer, [half], [score(half, -1.0, (half, -1.0))]), spelling)["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\\xc3", [0xC3], -1.0)
    assert entry["top_logprobs"] == [{"token": "\\xc3", "logprob": -1.0, "bytes": [0xC3]}]


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (dict(max_rows=64), [64, 64]),
        (dict(max_rows=50), [50, 50, 28]),
        (dict(cache_tokens=1000), [31] * 4 + [4]),
    ],
)
def test_more_answers_than_rows_are_asked_for_in_parts(tokenizer, settings, sizes):
    worker = Worker(Loaded(tiny_gpt(vocab_size=len(tokenizer)), tokenizer, "small"), **settings)
    ask = Ask([((1, 2), None), ((3,), None)], Sampling(seed=4), 30, n=128, written=128)
    parts = parts_of(ask, worker, frozenset())
    assert [part.n for part in parts] == [part.request.n for part in parts] == sizes * 2
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    assert [part.request.first for part in parts] == firsts * 2
    assert [part.first for part in parts] == firsts + [128 + first for first in firsts]
    assert {part.request.sampling.seed for part in parts} == {4}


def test_without_a_seed_every_prompt_has_its_own(tokenizer):
    worker = Worker(Loaded(tiny_gpt(vocab_size=len(tokenizer)), tokenizer, "small"), max_rows=2)
    ask = Ask([((1,), None), ((1,), None)], Sampling(), 5, n=3, written=3)
    seeds = [part.request.sampling.seed for part in parts_of(ask, worker, frozenset())]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
