"""An HTTP request is split into engine requests."""

from __future__ import annotations

import pytest

from heedful.generate.request import Sampling
from heedful.loaded import Loaded
from heedful.serve.generation import GenerationSpec, split_requests
from heedful.serve.worker import Worker
from heedful.text.tokenizer import Tokenizer
from support.folders import tiny_gpt
from support.serving import words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return words()


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (dict(max_rows=64), [48, 48, 32]),  # a quarter is kept for short requests
        (dict(max_rows=50), [38, 38, 38, 14]),
        (dict(cache_tokens=1000), [23] * 5 + [13]),
    ],
)
def test_more_answers_than_rows_are_asked_for_in_parts(tokenizer, settings, sizes):
    worker = Worker(Loaded(tiny_gpt(vocab_size=len(tokenizer)), tokenizer, "small"), **settings)
    spec = GenerationSpec([((1, 2), None), ((3,), None)], Sampling(seed=4), 30, n=128, best_of=128)
    subrequests = split_requests(spec, worker)
    assert [sub.n for sub in subrequests] == [sub.request.n for sub in subrequests] == sizes * 2
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    assert [sub.request.first for sub in subrequests] == firsts * 2
    assert [sub.first for sub in subrequests] == firsts + [128 + first for first in firsts]
    assert {sub.request.sampling.seed for sub in subrequests} == {4}


def test_without_a_seed_every_prompt_has_its_own(tokenizer):
    worker = Worker(Loaded(tiny_gpt(vocab_size=len(tokenizer)), tokenizer, "small"), max_rows=2)
    spec = GenerationSpec([((1,), None), ((1,), None)], Sampling(), 5, n=3, best_of=3)
    seeds = [sub.request.sampling.seed for sub in split_requests(spec, worker)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
