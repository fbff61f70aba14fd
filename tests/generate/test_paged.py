"""Paged keys and values: the same numbers as contiguous ones, prefixes read once, room made when there is none."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import heedful
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate
from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.state import KeyValueState
from support.case import error
from support.families import CASES

GREEDY = Sampling(temperature=0)
NAMES = (
    "gpt2", "gpt-neo-mixed", "gpt-j", "gpt-neox", "image-gpt", "llama3.2", "mistral", "mixtral", "qwen3-window",
    "gemma2", "phi3", "olmo2", "t5", "marian",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def bard():
    return heedful.load("shakespeare", dtype=torch.float32)


def paged(model, n_rows: int, n_blocks: int = 40, block: int = 4) -> PagedState:
    return pages_of(model, BlockPool(n_blocks, block), n_rows)


def pages_of(model, pool: BlockPool, n_rows: int) -> PagedState:
    return PagedState(pool, len(model.decoder.blocks), n_rows, cross=isinstance(model, EncoderDecoderModel))


@pytest.mark.parametrize("name", NAMES)
def test_paged_equals_contiguous(name):
    """Unequal rows through reading, stepping, reordering, forgetting, joining and leaving."""
    case = next(c for c in CASES if c.name == name)
    model, batch = case.model(), case.batch()

    def first(n_rows: int, n: int, state: PagedState) -> tuple[KeyValueState, PagedState]:
        """Both states after the first tokens of some rows."""
        sources = None if batch.source is None else batch.source[:n_rows, : 4 * n_rows]
        rows = Batch(batch.tokens[:n_rows, :n], source=sources)
        logits, other = model.start(rows)
        assert error(logits, model(rows).logits[:, -1]) < 1e-6
        assert error(model.start(rows, state=state)[0], logits) < 1e-6
        return other, state

    plain, pages = first(3, 3, paged(model, 3))

    def both(act) -> None:
        act(plain)
        act(pages)
        assert pages.lengths == plain.lengths
        following = (torch.arange(plain.n_rows) * 7 + 5) % 40 + 3
        assert error(model.step(following, pages), model.step(following, plain)) < 1e-6

    both(lambda s: s.truncate([1, 3, 2]))
    both(lambda s: s.select([2, 0, 2, 1]))
    both(lambda s: s.select([1, 1, 3, 0]))
    both(lambda s: s.free(2))
    both(lambda s: s.truncate([4, 2, 9, 9]))
    both(lambda s: s.remove_row(0))
    more, more_pages = first(2, 6, pages_of(model, pages.pool, 2))
    both(lambda s: s.append_rows(more if s is plain else more_pages, [1, 0, 1]))
    both(lambda s: s.truncate([9, 9, 9, 5, 5, 5]))
    for state in (more_pages, pages):
        state.select([])
    assert pages.pool.n_used == 0


def test_a_shared_prefix_is_read_once(bard):
    text = bard.generate("KING:\n", max_tokens=100, temperature=0.8, seed=1)
    shared = tuple(bard.tokenizer.encode(text))  # 100 tokens: 6 blocks of 16 and 4 more
    requests = [Request((*shared, i, i + 1, i + 2), max_tokens=5, sampling=GREEDY) for i in range(8)]
    engine = Engine(bard.model, state="paged")
    results = engine.run(requests)
    assert engine.runner.n_prefilled == 103 + 7 * (103 - 96)
    assert results == Engine(bard.model).run(requests)
    engine.run(requests[:1])  # the same again: its last block is not full
    assert engine.runner.n_prefilled == 103 + 8 * 7
    exact = Request(shared[:96], max_tokens=1, sampling=GREEDY)
    assert engine.run([exact]) == Engine(bard.model).run([exact])
    assert engine.runner.n_prefilled == 103 + 8 * 7 + 16  # the last token is always read, and with it its block
    assert engine.runner.pool.n_used == 0


class Counting(torch.nn.Module):
    """How many prompts each pass had, and how many tokens of them."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model, self.context_length, self.decoder, self.passes = model, model.context_length, model.decoder, []
        self.check_length, self.kv_cache = model.check_length, None

    def new_state(self, n_rows, capacity):
        return self.model.new_state(n_rows, capacity)

    def start(self, batch, **more):
        self.passes.append(len(batch.tokens))
        return self.model.start(batch, **more)

    def step(self, tokens, state, *, last=False):
        if tokens.ndim == 2:
            self.passes.append(len(tokens))
        return self.model.step(tokens, state, last=last)


@pytest.mark.parametrize("kind", ["plain", "float32"])
def test_short_prompts_are_read_side_by_side(bard, monkeypatch, kind):
    monkeypatch.setattr("heedful.generate.model_runner.DecoderModel", (DecoderModel, Counting))
    model = bard.model if kind == "plain" else accelerate(copy.deepcopy(bard.model), "inference", precision=kind)
    chance = random.Random(0)
    requests = [
        Request(tuple(chance.randrange(60) for _ in range(n)), max_tokens=4, sampling=GREEDY)
        for n in (9, 12, 20, 17, 11, 60)
    ]
    engine = Engine(Counting(model), state="paged", block=8, chunk=1000)
    assert engine.run(requests) == Engine(model).run(requests)
    assert engine.model.passes == [1, 4, 1]  # no more than half padding
    assert engine.runner.n_prefilled == sum(len(r.prompt) for r in requests)
    longer = [Request((*r.prompt, 5, 6), max_tokens=4, sampling=GREEDY) for r in requests]
    engine.model.passes.clear()
    assert engine.run(longer) == Engine(model).run(longer)  # beginnings of different lengths are known
    assert sum(engine.model.passes) == 6 and engine.runner.pool.n_used == 0


def test_requests_that_come_together_and_begin_alike_compute_it_once(bard):
    chance = random.Random(0)
    shared = tuple(chance.randrange(60) for _ in range(64))
    requests = [Request((*shared, i, i + 1), max_tokens=3, sampling=GREEDY) for i in range(20)]
    engine = Engine(bard.model, state="paged", chunk=80)
    for request in requests:
        engine.add(request)
    events = engine.step()
    assert engine.runner.n_prefilled <= 80
    assert len(events) + len(engine.step()) >= 20  # what is known takes nothing of what a step may read
    assert engine.runner.n_prefilled == 64 + 20 * 2
    while engine.busy:
        engine.step()
    assert engine.run(requests) == Engine(bard.model).run(requests)


def test_padding_takes_no_blocks(bard):
    tokens = torch.arange(36).view(3, 12)
    batch = Batch(tokens, torch.tensor([12, 1, 5]))
    logits, _ = bard.model.start(batch)
    pages = paged(bard.model, 3)
    found, _ = bard.model.start(batch, state=pages)
    assert error(found, logits) < 1e-5 and pages.pool.n_used == 3 + 1 + 2
    again = Batch(tokens.flip(0), torch.tensor([2, 12, 3]))  # each goes on from another place
    found, _ = bard.model.start(again, state=pages)
    assert pages.lengths == [14, 13, 8] and pages.pool.n_used == 4 + 4 + 2
    for row, (first, n, second, m) in enumerate([(0, 12, 2, 2), (1, 1, 1, 12), (2, 5, 0, 3)]):
        text = torch.cat([tokens[first, :n], tokens[second, :m]])[None]
        assert error(found[row], bard.model(text).logits[0, -1]) < 1e-5


def test_a_pool_is_bounded_and_costs_what_is_used(bard):
    engine = Engine(bard.model, max_rows=500, state="paged")
    assert engine.scheduler.max_cache_tokens == 2**15 and engine.runner.pool.n_blocks == 2**11
    assert Engine(bard.model, max_rows=4, state="paged").scheduler.max_cache_tokens == 4 * bard.model.context_length


def test_an_answer_is_the_beginning_of_the_next_prompt(bard):
    engine = Engine(bard.model, state="paged")
    prompt = tuple(range(10))
    (first,) = engine.run([Request(prompt, max_tokens=40, sampling=GREEDY)])
    longer = (*prompt, *first.choices[0].tokens, 3, 4)
    before = engine.runner.n_prefilled
    follow = Request(longer, max_tokens=5, sampling=GREEDY)
    assert engine.run([follow]) == Engine(bard.model).run([follow])
    assert engine.runner.n_prefilled - before == len(longer) - 48  # of 49 that were read, three blocks


def test_answers_to_one_prompt_share_its_blocks(bard):
    engine = Engine(bard.model, state="paged")
    id = engine.add(Request(tuple(range(40)), max_tokens=4, n=5, sampling=Sampling(seed=1)))
    engine.step()
    engine.step()
    assert engine.runner.pool.n_used == 2 + 5  # two full blocks for all, and one that each writes to
    engine.cancel(id)
    assert engine.runner.pool.n_used == 0


def test_a_small_pool_makes_room_and_keeps_results_right(bard):
    chance = random.Random(0)
    starts = [tuple(chance.randrange(60) for _ in range(40)) for _ in range(5)]
    requests = [
        Request(
            (
                *chance.choice(starts)[: chance.choice([16, 33, 40])],
                *(chance.randrange(60) for _ in range(3)),
            ),
            max_tokens=chance.randint(1, 20),
            sampling=Sampling(seed=i),
            n=chance.choice([1, 2]),
        )
        for i in range(60)
    ]
    engine = Engine(bard.model, state="paged", cache_tokens=256, block=8, chunk=32)
    assert engine.run(requests) == Engine(bard.model).run(requests)
    pool = engine.runner.pool
    assert pool.n_used == 0 and not any(pool.references)
    assert engine.runner.n_prefilled < sum(len(r.prompt) for r in requests)  # some was shared all the same
    with pytest.raises(ValueError, match=r"272 .*256"):
        engine.add(Request((1,) * 30, max_tokens=100, n=2))


def test_the_least_recently_used_goes_first():
    pool = BlockPool(4, 2)
    tables = {}
    for name in "abcd":
        tables[name] = [pool.allocate()]
        pool.cache_prefix([ord(name)] * 2, tables[name])
        pool.release(tables[name])
    pool.share(pool.find_prefix([97, 97])[0])  # a is used again
    pool.release(tables["a"])
    pool.allocate(), pool.allocate()
    assert [bool(pool.find_prefix([ord(name)] * 2)) for name in "abcd"] == [True, False, False, True]
    pool.allocate(), pool.allocate()
    with pytest.raises(RuntimeError, match="all 4 blocks"):
        pool.allocate()
    with pytest.raises(ValueError, match="room for nothing"):
        BlockPool(0)


def test_blocks_are_found_by_all_that_lies_before_them():
    pool = BlockPool(8, 2)
    table = [pool.allocate() for _ in range(3)]
    pool.cache_prefix([1, 2, 3, 4, 5, 6], table)
    assert pool.find_prefix([1, 2, 3, 4, 5]) == table[:2]
    assert pool.find_prefix([3, 4]) == [] and pool.find_prefix([1, 2, 9, 9, 5, 6]) == table[:1]
    pool.release(table)
    for _ in range(6):  # five were free; the end of the known text goes before its beginning
        pool.allocate()
    assert pool.find_prefix([1, 2, 3, 4, 5, 6]) == table[:2]
