"""Prefill bounded by time, on a clock that passes of the model alone advance."""

from __future__ import annotations

import pytest
import torch

from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.decode import KernelStack
from heedful.kernels.cpu.library import library
from heedful.models.llama import Llama
from support.tiny import tiny

GREEDY = Sampling(temperature=0)


@pytest.fixture
def clock(monkeypatch):
    """The engine's clock, which passes of the model alone advance: 20 ms for the weights, 1 ms for a token, 1 µs for
    each key that it attends to."""
    now = [0.0]
    monkeypatch.setattr("heedful.generate.engine.perf_counter", lambda: now[0])
    hidden = Llama.hidden

    def timed(self, batch, state=None):
        counts = [batch.ids.shape[1]] * state.n_rows if batch.lengths is None else batch.lengths.tolist()
        pairs = zip(counts, state.lengths, strict=True)
        now[0] += 0.02 + sum(1e-3 * n + 1e-6 * n * (at + n / 2) for n, at in pairs)
        return hidden(self, batch, state)

    monkeypatch.setattr(Llama, "hidden", timed)
    return now


def llama(kind: str):
    """A model, and the state of its engine; "combined" decodes and prefills in one pass where there are C kernels."""
    model = tiny("llama", max_len=2048, d_model=64, d_head=16, d_ff=64)
    if kind == "combined":
        accelerate(model, "inference", precision="float32")
        assert library() is None or isinstance(model.decoder, KernelStack)
    return model, "paged" if kind == "combined" else kind


@pytest.mark.parametrize("kind", ["paged", "combined"])
def test_beside_a_long_prompt_others_begin_soon_and_go_on(clock, kind):
    model, state = llama(kind)
    prompt = torch.randint(3, 60, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine(model, state=state, chunk=1024, step_time=0.25, cache_tokens=8192)
    stream = engine.add(Request(prompt=(3, 4), max_tokens=1000, sampling=GREEDY))
    while not engine.step():
        pass
    long = engine.add(Request(prompt=tuple(prompt), max_tokens=3, sampling=GREEDY))
    tokens, gaps, waits, steps = {}, [], [], 0
    while long not in tokens:
        begin = clock[0]
        if steps % 5 == 0:  # a short request now and then
            short = engine.add(Request(prompt=(5, 6, 7, 8), max_tokens=1))
            asked = begin
        for event in engine.step():
            tokens[event.id] = event.token
            waits += [clock[0] - asked] if event.id == short else []
        assert stream in tokens
        gaps.append(clock[0] - begin)
        steps += 1
    assert len(waits) == -(-steps // 5) and max(waits) < 0.25
    alone = 0.021
    assert sorted(gaps)[len(gaps) // 2] < 3 * alone  # a token of the stream, in the median and at worst
    assert max(gaps[10:]) < 6 * alone
    (result,) = Engine(model, chunk=2048).run([Request(prompt=tuple(prompt), max_tokens=1, sampling=GREEDY)])
    assert tokens[long] == result.choices[0].tokens[0]


def test_prompts_share_the_decode_pass(clock):
    """Beside a stream, two prompts cost their tokens: the weights are read once for all of them."""
    model, state = llama("combined")
    if library() is None:
        pytest.skip("decode and prefill share a pass where the C kernels run")
    engine = Engine(model, state=state, chunk=1024, step_time=0.25, cache_tokens=8192)
    engine.add(Request(prompt=(3, 4), max_tokens=1000, sampling=GREEDY))
    for _ in range(3):
        engine.step()
    ids = {engine.add(Request(prompt=tuple(range(first, first + 50)), max_tokens=1)) for first in (3, 5)}
    begin, steps = clock[0], 0
    while ids:
        steps += 1
        ids -= {event.id for event in engine.step()}
    weights = (clock[0] - begin - 0.1 - 1e-3 * steps) / 0.02  # passes, by what is left of the time without tokens
    assert weights < steps + 1.5  # one each step, but where a decode pass is timed alone


def test_alone_a_long_prompt_takes_what_its_passes_take(clock):
    model = tiny("llama", max_len=2048)
    engine = Engine(model, state="paged", chunk=1024, step_time=0.25, cache_tokens=8192)
    engine.add(Request(prompt=tuple([5] * 1000), max_tokens=1))
    begin, steps = clock[0], []
    while engine.busy:
        at = clock[0]
        engine.step()
        steps.append(clock[0] - at)
    assert max(steps) < 0.4  # so long would somebody wait who comes now
    assert clock[0] - begin < 1.25 * (1.0 + 1e-6 * 1000**2 / 2)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "combined"])
def test_what_a_prompt_shares_its_steps_with_changes_nothing(clock, kind):
    model, state = llama(kind)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (n,), generator=draw).tolist() for n in (3, 150, 40, 5, 90, 1, 60)]
    prompts += [[*prompts[1][:100], 7, 8], prompts[1][:96]]  # beginnings that another one computes
    requests = [
        Request(tuple(p), max_tokens=10 + i, sampling=GREEDY, logprobs=2, echo=i == 2, n=1 + (i == 3))
        for i, p in enumerate(prompts)
    ]
    engine = Engine(model, state=state, chunk=64, step_time=0.05, cache_tokens=4096)
    ids, results = {}, {}
    while engine.busy or len(ids) < len(requests):
        if len(ids) < len(requests):  # one after another, so that they are in each other's steps
            ids[engine.add(requests[len(ids)])] = len(ids)
        for event in engine.step():
            if event.result is not None:
                results[ids[event.id]] = event.result
    for i, request in enumerate(requests):
        (alone,) = Engine(model).run([request])
        assert [c.tokens for c in results[i].choices] == [c.tokens for c in alone.choices]
        for ours, theirs in zip(results[i].choices, alone.choices, strict=True):
            assert [s.logprob for s in ours.scores] == pytest.approx([s.logprob for s in theirs.scores], abs=1e-3)
    if engine.runner.pool is not None:
        assert engine.runner.pool.n_used == 0


def test_a_pass_that_decodes_and_prefills_may_fail(clock, monkeypatch):
    model, state = llama("combined")
    if library() is None:
        pytest.skip("decode and prefill share a pass where the C kernels run")
    (alone,) = Engine(model).run([Request(prompt=(3, 4), max_tokens=60, sampling=GREEDY)])
    engine = Engine(model, state=state, chunk=64, step_time=0.05, cache_tokens=4096)
    stream = engine.add(Request(prompt=(3, 4), max_tokens=60, sampling=GREEDY))
    for _ in range(3):
        engine.step()
    long = engine.add(Request(prompt=(5,) * 300, max_tokens=2))
    start = model.start
    monkeypatch.setattr(model, "start", lambda batch, **more: fail() if len(batch.ids) > 1 else start(batch, **more))

    def fail():
        raise RuntimeError("too much at once")

    found = {}
    while engine.busy:
        found |= {event.id: event.result for event in engine.step() if event.result is not None}
    assert found[stream] == alone and found[long].choices[0].finish_reason == "length"
    assert engine.runner.pool.n_used == 0


def test_a_short_prompt_is_answered_before_a_long_one_that_came_first():
    engine = Engine(tiny("llama", max_len=2048), chunk=8)
    long = engine.add(Request(tuple(3 + i % 50 for i in range(200)), max_tokens=2, sampling=GREEDY))
    order = [event.id for event in engine.step()]
    short = engine.add(Request((3, 4, 5), max_tokens=2, sampling=GREEDY))
    for _ in range(3):
        order += [event.id for event in engine.step()]
    assert short in order and long not in order


def test_a_few_tokens_that_take_long_are_not_in_every_step(monkeypatch):
    """At the end of a long prompt the least chunk takes longer than a decode pass: then steps in between have none."""
    now = [0.0]
    monkeypatch.setattr("heedful.generate.engine.perf_counter", lambda: now[0])
    hidden = Llama.hidden

    def timed(self, batch, state=None):
        n = batch.ids.shape[1]
        now[0] += 0.02 + (0 if n == 1 else sum(2e-5 * n * length for length in state.lengths if length > 100))
        return hidden(self, batch, state)

    monkeypatch.setattr(Llama, "hidden", timed)
    model, _ = llama("paged")
    engine = Engine(model, state="paged", chunk=1024, step_time=0.5, cache_tokens=8192)
    stream = engine.add(Request((3, 4), max_tokens=90, sampling=GREEDY))
    for _ in range(5):
        engine.step()
    engine.add(Request(tuple(3 + i % 50 for i in range(1500)), max_tokens=1))
    gaps, sizes = [], []
    while stream in engine._groups:
        begin, n = now[0], engine.runner.n_prefilled
        engine.step()
        gaps.append(now[0] - begin)
        sizes.append(engine.runner.n_prefilled - n)
    late = [gap for gap, total in zip(gaps, range(len(gaps)), strict=True) if total > 10]
    assert sum(sizes) > 200 and sum(late) / len(late) < 3 * 0.02
