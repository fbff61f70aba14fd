"""What goes wrong in one request is that request's own: the others are answered as if nothing had happened."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import heedful
from heedful.generate.engine import Engine, Event
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.library import library
from heedful.models.base import DecoderModel
from support.families import CASES
from support.uncached import generate_uncached

GREEDY = Sampling(temperature=0)
STATES = ["contiguous", "paged"]


@pytest.fixture(scope="module")
def bard():
    return heedful.load("shakespeare", dtype=torch.float32)


class Stumbling(torch.nn.Module):
    """A model that fails when it reads a certain token, or says nothing but nonsense after it."""

    def __init__(self, model, raises=None, nonsense=None, late=False) -> None:
        super().__init__()
        self.model, self.raises, self.nonsense, self.late = model, raises, nonsense, late
        self.context_length, self.check_length, self.kv_cache = model.context_length, model.check_length, None

    @property
    def decoder(self):
        return self.model.decoder

    def new_state(self, n_rows, capacity):
        return self.model.new_state(n_rows, capacity)

    def start(self, batch, **more):
        self._stumble(batch.tokens)
        return self.model.start(batch, **more)

    def step(self, tokens, state, *, last=False):
        if not self.late:
            self._stumble(tokens)
        logits = self.model.step(tokens, state, last=last)
        self._stumble(tokens)
        if self.nonsense is not None and tokens.ndim == 1:
            logits[tokens == self.nonsense] = torch.nan
        return logits

    def _stumble(self, tokens):
        if self.raises is not None and (tokens == self.raises).any():
            raise RuntimeError("out of memory, perhaps")


@pytest.fixture
def decoders(monkeypatch):
    """The engine takes it for a decoder, as what is in it."""
    monkeypatch.setattr("heedful.generate.model_runner.DecoderModel", (DecoderModel, Stumbling))


@pytest.mark.parametrize("state", STATES)
def test_a_prompt_that_fails_fails_alone(bard, decoders, state):
    engine = Engine(Stumbling(bard.model, raises=65), state=state)
    running = engine.add(Request((7, 8), max_tokens=8, sampling=GREEDY))
    events = engine.step()
    ids = [engine.add(Request((7, token), max_tokens=2, sampling=GREEDY)) for token in (9, 65, 10)]
    long = engine.add(Request((7, 65) * 20, max_tokens=1, echo=True))
    biased = engine.add(Request((7, 11), sampling=Sampling(temperature=0, logit_bias={99: 1})))
    while engine.busy:
        events += engine.step()
    last = {event.id: event for event in events}
    for bad, words in (ids[1], "perhaps"), (long, "perhaps"), (biased, "token 99 (at 0 of logit_bias)"):
        assert last[bad].finish_reason == "error" and words in str(last[bad].error)
    for good, prompt, n in ((running, (7, 8), 8), (ids[0], (7, 9), 2), (ids[2], (7, 10), 2)):
        want = generate_uncached(bard.model, Request(prompt, max_tokens=n, sampling=GREEDY))
        assert last[good].result.choices[0].tokens == want
    assert engine.runner.pool is None or engine.runner.pool.n_used == 0


@pytest.mark.parametrize("state", STATES)
def test_an_encoder_decoder_that_fails_in_prefill_or_decoding_keeps_no_blocks(state, monkeypatch):
    """In a batch of three, once after the blocks were taken, once in a step; then each alone is tried."""
    model = next(case for case in CASES if case.name == "t5").model()
    sources, decode, passes = [(5, 9, 11), (7, 8), (20, 21, 22, 23)], model.decode, []
    requests = [Request((), source, 5, GREEDY) for source in sources]
    want = [generate_uncached(model, request) for request in requests]

    def stumble(batch, memory, state=None):
        hidden = decode(batch, memory, state)
        passes.append(len(batch.ids))
        if len(passes) in (1, 6):
            raise RuntimeError("out of memory, perhaps")
        return hidden

    monkeypatch.setattr(model, "decode", stumble)
    engine = Engine(model, max_rows=3, state=state)
    assert [events[-1].result.choices[0].tokens for events in followed(engine, requests)] == want
    assert passes[0] == 3 and passes[1:4] == [1, 1, 1] and passes[5] > 1
    assert engine.runner.pool is None or engine.runner.pool.n_used == 0


def followed(engine: Engine, requests: list[Request]) -> list[list[Event]]:
    """All events of each request."""
    ids, events = [engine.add(r) for r in requests], []
    while engine.busy:
        events += engine.step()
    return [[event for event in events if event.id == id] for id in ids]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after it was noted"])
@pytest.mark.parametrize("kind", ["plain", "float32"])
@pytest.mark.parametrize("state", STATES)
def test_a_step_that_fails_fails_for_the_row_at_fault_alone(bard, decoders, state, kind, late):
    """The others say the same to the last bit, with the row that fails and without."""
    model = bard.model if kind == "plain" else accelerate(copy.deepcopy(bard.model), "inference", precision=kind)
    never = Sampling(seed=3, logit_bias={60: -100})
    requests = [Request((i,) * (1 + i % 9), max_tokens=12, sampling=never, logprobs=0) for i in range(7, 12)]
    requests[1:1] = [Request((33, 5), max_tokens=12, n=2, sampling=Sampling(seed=1, logit_bias={60: 11}))]
    want = followed(Engine(model, state=state, block=4, cache_tokens=200), requests)
    said = [e.token for e in want[1] if e.index == 0]
    at = next(i for i, event in enumerate(want[1]) if event.token == 60) // 2  # both speak in turn
    engine = Engine(Stumbling(model, raises=60, late=late), state=state, block=4, cache_tokens=200)
    found = followed(engine, requests)
    assert 1 < at < 10 and [e.token for e in found[1] if e.index == 0] == [*said[: at + 1], None]
    assert {e.finish_reason for e in found[1][-2:]} == {"error"} and "perhaps" in str(found[1][-1].error)
    for i in 0, 2, 3, 4, 5:
        mine, theirs = found[i][-1].result.choices[0], want[i][-1].result.choices[0]
        assert mine.tokens == theirs.tokens
        if kind == "float32" and library() is not None:
            assert mine == theirs  # to the last bit of its log-probabilities
    assert engine.runner.pool is None or engine.runner.pool.n_used == 0


@pytest.mark.parametrize("name", ["t5", "seq2seq-gru-bi-dot", "phi3-longrope"])
def test_so_it_is_in_every_family(name):
    case = next(c for c in CASES if c.name == name)
    model = case.model()
    decoder = not hasattr(model, "encoder")
    ids = [tuple(range(3 + i, 6 + 3 * i)) for i in range(5)]
    never, always = (Sampling(temperature=0, logit_bias={7: bias}) for bias in (-100, 100))
    requests = [Request(p if decoder else (), None if decoder else p, 7, never) for p in ids]
    want = [generate_uncached(model, r) for r in requests]
    requests[2] = dataclasses.replace(requests[2], sampling=always)
    step = model.step

    def stumbles(tokens, state, **more):
        logits = step(tokens, state, **more)
        if tokens.ndim == 1 and (tokens == 7).any():
            raise RuntimeError("out of memory, perhaps")
        return logits

    model.step = stumbles
    found = followed(Engine(model), requests)
    assert "perhaps" in str(found[2][-1].error)
    assert [f[-1].result.choices[0].tokens for i, f in enumerate(found) if i != 2] == want[:2] + want[3:]


def test_nonsense_in_one_row_ends_that_row_alone(bard, decoders):
    requests = [Request((i,), max_tokens=6, sampling=GREEDY) for i in (7, 33)]
    want = [generate_uncached(bard.model, r) for r in requests]
    engine = Engine(Stumbling(bard.model, nonsense=want[0][2]))
    ids = [engine.add(r) for r in requests]
    events = []
    while engine.busy:
        events += engine.step()
    last = {event.id: event for event in events}
    assert last[ids[0]].finish_reason == "error" and "finite" in str(last[ids[0]].error)
    assert last[ids[1]].result.choices[0].tokens == want[1]


@pytest.mark.parametrize("state", STATES)
def test_nothing_of_a_failed_row_is_left_to_the_next(bard, state):
    """A row whose keys and values are no numbers; what comes in its place is shorter than its neighbour."""
    model = copy.deepcopy(bard.model)
    with torch.no_grad():
        model.embed.weight[65] = torch.nan
    requests = [Request((i,) * n, max_tokens=12, sampling=GREEDY) for i, n in ((7, 40), (33, 1), (3, 1))]
    want = [generate_uncached(bard.model, r) for r in requests]
    bias = Sampling(temperature=0, logit_bias={65: 100})
    # Untied, so that only reading the token is ruinous, not thinking of it.
    model.head.weight = torch.nn.Parameter(bard.model.head.weight.clone())
    engine = Engine(model, state=state, block=4, cache_tokens=400)
    ids = [engine.add(requests[0]), engine.add(Request((8, 8), max_tokens=12, sampling=bias))]
    events = []
    while ids[1] in engine._groups:
        events += engine.step()
    ids += [engine.add(r) for r in requests[1:]]
    while engine.busy:
        events += engine.step()
    last = {event.id: event for event in events}
    assert last[ids[1]].finish_reason == "error"
    assert [last[i].result.choices[0].tokens for i in (ids[0], ids[2], ids[3])] == want
