"""Many requests through one engine: each is answered as if it were alone, and as plain passes of the model say."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import heedful
from heedful.generate.engine import Engine, Event
from heedful.generate.grammar import Grammar
from heedful.generate.request import Request, Result, Sampling
from heedful.models.base import Batch
from support.families import CASES
from support.uncached import generate_uncached

GREEDY = Sampling(temperature=0)
STATES = ["contiguous", "paged"]


@pytest.fixture(scope="module")
def bard():
    return heedful.load("shakespeare", dtype=torch.float32)


def ours(name: str, path: str = "plain"):
    case = next(c for c in CASES if c.name == name)
    return case.model(path)


def settings(chance: random.Random) -> Sampling:
    if chance.random() < 0.4:
        return GREEDY
    return Sampling(
        temperature=chance.choice([0.5, 1.0, 1.3]),
        top_k=chance.choice([None, 5]),
        top_p=chance.choice([1.0, 0.9]),
        frequency_penalty=chance.choice([0.0, 0.7]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        seed=chance.randrange(2**32),
    )


def flow(engine: Engine, requests: list[Request], chance: random.Random) -> list[tuple[Result, list[Event]]]:
    """Requests that come a few at a time, while others are being answered."""
    coming, ids = list(requests), []
    events: dict[int, list[Event]] = {}
    while coming or engine.busy:
        for _ in range(min(len(coming), chance.randint(0, 5))):
            ids.append(engine.add(coming.pop(0)))
        for event in engine.step():
            events.setdefault(event.id, []).append(event)
    return [(events[id][-1].result, events[id]) for id in ids]


def check_stream(request: Request, result: Result, events: list[Event]) -> None:
    """The events of a request tell what its result says."""
    if request.best_of:
        return
    for choice in result.choices:
        mine = [e for e in events if e.index == choice.index]
        assert "".join(e.piece for e in mine) == choice.text
        assert [e.token for e in mine if e.token is not None] == choice.tokens
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def same(a: Result, b: Result) -> bool:
    """Equal but for the last digits of scores."""
    for x, y in zip(a.choices, b.choices, strict=True):
        if x.scores is not None:
            mine, theirs = ([s.logprob for s in (*c.scores, c.end) if s is not None] for c in (x, y))
            assert mine == pytest.approx(theirs, abs=1e-4)
    bare = lambda r: [dataclasses.replace(c, scores=None, end=None) for c in r.choices]  # noqa: E731
    return bare(a) == bare(b)


@pytest.fixture(scope="module")
def hundred(bard) -> list[tuple[Request, Result]]:
    """Requests of all kinds, each answered alone, and some by hand."""
    chance = random.Random(1)
    text = bard.generate("First Citizen:\n", max_tokens=120, temperature=0.9, seed=5)
    asked = []
    for i in range(100):
        begin = chance.randrange(40)
        request = Request(
            tuple(bard.tokenizer.encode(text[begin : begin + chance.choice([1, 3, 10, 30, 80])])),
            max_tokens=chance.choice([1, 2, 5, 12, 20]),
            sampling=settings(chance),
            stop=chance.choice([(), (), (".", "and"), ("\n\n",)]),
            stop_ids=chance.choice([frozenset(), frozenset(bard.tokenizer.encode("?;"))]),
            n=chance.choice([1, 1, 1, 2]),
            logprobs=chance.choice([None, 0, 3]),
        )
        (alone,) = Engine(bard.model, bard.tokenizer).run([request])
        asked.append((request, alone))
        if i % 4 == 0:
            said, plain = alone.choices[-1].tokens, generate_uncached(bard.model, request, request.n - 1)
            assert said == (plain[: len(said)] if request.stop else plain)
    assert {choice.finish_reason for _, alone in asked for choice in alone.choices} == {"stop", "length"}
    return asked


@pytest.mark.parametrize("state", STATES)
def test_a_hundred_requests_equal_their_solo_runs(bard, hundred, state):
    engine = Engine(bard.model, bard.tokenizer, max_rows=12, chunk=64, state=state)
    answered = flow(engine, [request for request, _ in hundred], random.Random(2))
    for (request, alone), (result, events) in zip(hundred, answered, strict=True):
        assert same(result, alone)
        check_stream(request, result, events)
    assert not engine.busy


@pytest.mark.parametrize(
    ("name", "state", "path"),
    [
        ("t5", "contiguous", "plain"),
        ("t5", "paged", "plain"),
        ("t5", "paged", "inference"),
        ("marian", "contiguous", "plain"),
        ("marian", "paged", "plain"),
        ("transformer-pre-norm", "contiguous", "plain"),
        ("transformer-pre-norm", "paged", "inference"),
        ("seq2seq-gru-bi-dot", None, "plain"),
        ("seq2seq-lstm-bi-additive-2", None, "plain"),
        ("phi3-longrope", None, "plain"),
    ],
)
def test_other_families_go_through_the_same_engine(name, state, path):
    model, chance = ours(name, path), random.Random(2)
    decoder = not hasattr(model, "encoder")
    requests = []
    for _ in range(20):
        ids = tuple(chance.randrange(3, 45) for _ in range(chance.randint(1, 17)))
        prompt = ids if decoder else chance.choice([(), (model.start_id, 7, 8)])
        ends = frozenset({4, 5})
        requests.append(
            Request(prompt, None if decoder else ids, chance.randint(1, 12), settings(chance), stop_ids=ends)
        )
    engine = Engine(model, max_rows=4, chunk=12, state=state)
    for request, (result, events) in zip(requests, flow(engine, requests, chance), strict=True):
        assert result.choices[0].tokens == generate_uncached(model, request)
        check_stream(request, result, events)
    if engine.runner.pool is not None:
        assert engine.runner.pool.n_used == 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_an_echoed_prompt_is_scored(bard, state, chunk):
    prompt = tuple(bard.tokenizer.encode("To be, or not to be: that is the question"))
    request = Request(prompt, max_tokens=4, sampling=GREEDY, logprobs=2, echo=True)
    engine = Engine(bard.model, bard.tokenizer, chunk=chunk, state=state)
    engine.run([Request(prompt, max_tokens=1)])  # what is known of the prompt must not be left out
    whole, alone = engine.run([request, dataclasses.replace(request, max_tokens=0, n=2)])
    with torch.no_grad():
        said = prompt + tuple(whole.choices[0].tokens)
        logs = bard.model(torch.tensor([said])).logits[0].log_softmax(-1)
    for result in (whole, alone):
        first, *scores = result.prompt_scores
        assert first is None and [s.token for s in scores] == list(prompt[1:])
        for place, score in enumerate(scores):
            assert score.logprob == pytest.approx(logs[place, score.token].item(), abs=1e-5)
            values, ids = logs[place].topk(2)
            assert [t for t, _ in score.top] == ids.tolist()
            assert [v for _, v in score.top] == pytest.approx(values.tolist(), abs=1e-5)
    for place, score in enumerate(whole.choices[0].scores):
        want = logs[len(prompt) - 1 + place, score.token].item()
        assert score.logprob == pytest.approx(want, abs=1e-5)
    assert whole.choices[0].text == bard.tokenizer.decode(said)
    assert [c.tokens for c in alone.choices] == [[], []]
    assert {(c.text, c.finish_reason) for c in alone.choices} == {(bard.tokenizer.decode(prompt), "length")}


def test_a_target_can_be_scored_too():
    model = ours("t5")
    source, target = (5, 9, 11, 3), (model.start_id, 8, 20, 31)
    (result,) = Engine(model).run([Request(target, source, 0, echo=True)])
    with torch.no_grad():
        logs = model(Batch(torch.tensor([target]), source=torch.tensor([source]))).logits[0].log_softmax(-1)
    want = [logs[i, t].item() for i, t in enumerate(target[1:])]
    assert [s.logprob for s in result.prompt_scores[1:]] == pytest.approx(want, abs=1e-5)


def test_the_best_of_several_are_those_with_the_highest_mean(bard):
    prompt = tuple(bard.tokenizer.encode("KING:\n"))
    how = Sampling(seed=3)
    request = Request(prompt, max_tokens=9, sampling=how, n=2, best_of=6, stop=(" the",))
    engine = Engine(bard.model, bard.tokenizer)
    chosen, everyone = engine.run([request, dataclasses.replace(request, n=6, best_of=None, logprobs=0)])
    mean = {c.index: sum(s.logprob for s in c.scores) / len(c.scores) for c in everyone.choices}
    order = sorted(mean, key=mean.__getitem__, reverse=True)
    assert [c.tokens for c in chosen.choices] == [everyone.choices[i].tokens for i in order[:2]]
    assert [c.index for c in chosen.choices] == [0, 1] and chosen.choices[0].scores is None
    assert len({tuple(c.tokens) for c in everyone.choices}) == 6


@pytest.mark.parametrize("state", STATES)
def test_the_context_ends_an_answer_and_never_more(bard, state):
    longest = bard.model.context_length
    engine = Engine(bard.model, bard.tokenizer, state=state, chunk=100)
    lengths = [longest, longest - 5, 3]
    short = [Request((1,) * n, max_tokens=10, sampling=GREEDY) for n in lengths]
    results = engine.run(short)
    assert [len(r.choices[0].tokens) for r in results] == [1, 6, 10]  # the last one is said, not read
    assert {r.choices[0].finish_reason for r in results} == {"length"}
    with pytest.raises(ValueError, match=rf"{longest + 1} tokens.* {longest}"):
        engine.add(Request((1,) * (longest + 1)))


def test_what_cannot_be_answered_is_refused(bard):
    engine = Engine(bard.model, max_rows=2)
    for request, words in [
        (Request(()), "empty"),
        (Request((1,), source=(1,)), "no encoder"),
        (Request((1, 66)), "66"),
        (Request((-1,)), "-1"),
        (Request((1,), stop=("x",)), "tokenizer"),
        (Request((1,), n=3), "max_rows"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.add(request)
    with pytest.raises(ValueError, match="source"):
        Engine(ours("t5")).add(Request((1,)))
    with pytest.raises(ValueError, match="paged"):
        Engine(ours("seq2seq-gru-bi-dot"), state="paged")
    with pytest.raises(ValueError, match="neither"):
        Engine(bard.model, state="loose")
    assert not engine.busy


@pytest.mark.parametrize("state", STATES)
def test_running_rows_get_a_token_in_every_step_while_a_long_prompt_is_read(bard, state):
    engine = Engine(bard.model, bard.tokenizer, chunk=10, state=state)
    short = engine.add(Request((1, 2), max_tokens=40, sampling=GREEDY))
    engine.step()
    long = engine.add(Request((3,) * 95, max_tokens=2, sampling=GREEDY))
    for step in range(10):
        events = engine.step()
        assert [e.id for e in events if e.token is not None] == [short] + [long] * (step == 9)
        assert engine.runner.n_prefilled == 2 + min(95, 10 * (step + 1))


@pytest.mark.parametrize("state", STATES)
def test_cancelled_requests_leave_at_once(bard, state):
    engine = Engine(bard.model, bard.tokenizer, max_rows=3, chunk=8, state=state, cache_tokens=400)
    speaking = engine.add(Request((1, 2), max_tokens=30, n=2))
    reading = engine.add(Request((1,) * 20, max_tokens=30))
    waiting = [engine.add(Request((5,), max_tokens=3, sampling=GREEDY)) for _ in range(2)]
    engine.step()
    assert engine.cancel(speaking) and engine.cancel(reading) and engine.cancel(waiting[0])
    assert not engine.cancel(speaking)
    assert {event.id for event in engine.step()} == {waiting[1]}
    while engine.busy:
        (event,) = engine.step()
    assert event.result.choices[0].tokens == generate_uncached(bard.model, Request((5,), max_tokens=3, sampling=GREEDY))
    if engine.runner.pool is not None:
        assert engine.runner.pool.n_used == 0


def test_streams_and_runs_share_an_engine(bard):
    engine = Engine(bard.model, bard.tokenizer)
    requests = [Request((i,), max_tokens=6, sampling=Sampling(seed=i)) for i in range(3)]
    want = [r.choices[0].text for r in engine.run(requests)]
    other = engine.add(requests[0])
    stream = engine.stream(requests[1])
    first = next(stream)
    assert engine.run([requests[2]])[0].choices[0].text == want[2]
    rest = [event for event in engine.step() if event.id == other]  # kept while the others were waited for
    assert "".join(e.piece for e in rest) == want[0] and rest[-1].result is not None
    assert first.piece == want[1][:1]
    stream.close()
    assert not engine.busy
    with pytest.raises(ValueError, match="empty"):
        engine.run([requests[0], Request(())])
    assert not engine.busy


def test_the_stop_token_has_a_score_of_its_own(bard):
    prompt = tuple(bard.tokenizer.encode("ROMEO:\n"))
    free = Request(prompt, max_tokens=9, sampling=GREEDY, logprobs=2)
    engine = Engine(bard.model, bard.tokenizer)
    (whole,) = engine.run([free])
    said = whole.choices[0].tokens
    stops = dataclasses.replace(free, stop_ids=frozenset({said[4]}))
    (stopped,) = engine.run([stops])
    n = said.index(said[4])
    choice = stopped.choices[0]
    assert choice.tokens == said[:n] and len(choice.scores) == n and choice.finish_reason == "stop"
    assert choice.end.token == said[4] and len(choice.end.top) == 2
    assert choice.end.logprob == pytest.approx(whole.choices[0].scores[n].logprob, abs=1e-5)
    (silent,) = engine.run([dataclasses.replace(stops, logprobs=None)])
    assert silent.choices[0].end is None and whole.choices[0].end is None


def test_answers_can_be_asked_for_in_parts(bard):
    engine = Engine(bard.model, bard.tokenizer, max_rows=3)
    whole = Request((5, 6), max_tokens=8, sampling=Sampling(seed=11), n=3)
    parts = [dataclasses.replace(whole, n=2), dataclasses.replace(whole, n=1, first=2)]
    all_of_it, *found = engine.run([whole, *parts])
    assert [c.tokens for c in all_of_it.choices] == [c.tokens for r in found for c in r.choices]
    assert [c.index for r in found for c in r.choices] == [0, 1, 0]
    with pytest.raises(ValueError, match="first is -1"):
        Request((1,), first=-1)


def test_lists_of_prompts_are_answered_together(bard):
    prompts = ["ROMEO:\n", "What ", "First Citizen:\nBefore we proceed"]
    together = bard.generate(prompts, max_tokens=12, temperature=0)
    assert together == [bard.generate(p, max_tokens=12, temperature=0) for p in prompts]
    assert ["".join(bard.stream(p, max_tokens=12, temperature=0)) for p in prompts] == together
    assert bard.generate([], max_tokens=3) == []
    text = bard.generate("ROMEO:\n", max_tokens=60, temperature=0, stop=" the")
    assert " the" not in text and text
    (result,) = bard.complete("O", max_tokens=3, n=2, logprobs=1, seed=4, min_p=0.05, presence_penalty=0.5)
    assert len(result.choices) == 2 and len(result.choices[1].scores[2].top) == 1
    for wrong in ({"n": 2}, {"logprobs": 0}, {"logprobs": 1}, {"echo": True}):
        with pytest.raises(ValueError, match="complete"):
            bard.generate("O", **wrong)
    with pytest.raises(ValueError, match="top_q"):
        bard.generate("O", top_q=1)


# --- preemption -----------------------------------------------------------------------------------------------------


def crowd(bard) -> list[Request]:
    """Long answers of every kind, for which together there is no room."""
    chance, requests = random.Random(3), []
    more = [{"logprobs": 2}, {"stop": ("and\n", "zz")}, {}, {"grammar": Grammar("regex", "[a-z ]{60}\n")}, {"n": 2}]
    for i in range(12):
        prompt = tuple(chance.randrange(3, 60) for _ in range(chance.choice([5, 40, 90])))
        sampling = GREEDY if i % 3 == 0 else Sampling(
            seed=i, temperature=0.9, repetition_penalty=1.1, frequency_penalty=0.3, no_repeat_ngram_size=7 * (i % 2)
        )  # fmt: skip
        requests.append(Request(prompt, max_tokens=100, sampling=sampling, min_tokens=3, **more[i % 5]))
    return requests


@pytest.mark.parametrize("state", STATES)
def test_a_preempted_answer_is_that_of_an_uninterrupted_one(bard, state):
    requests = crowd(bard)
    alone = [Engine(bard.model, bard.tokenizer).run([request])[0] for request in requests]
    engine = Engine(bard.model, bard.tokenizer, max_rows=16, chunk=64, state=state, cache_tokens=640, short_share=0.25)
    answered = flow(engine, requests, random.Random(4))
    assert engine.scheduler.n_preempted >= 3
    for request, expected, (result, events) in zip(requests, alone, answered, strict=True):
        assert same(result, expected)
        check_stream(request, result, events)
    if engine.runner.pool is not None:
        assert engine.runner.pool.n_used == 0


def test_what_was_preempted_may_be_cancelled_and_its_prefill_may_fail(bard, monkeypatch):
    engine = Engine(bard.model, bard.tokenizer, max_rows=8, chunk=64, state="paged", cache_tokens=640, short_share=0.25)
    requests = [Request((i,) * 90, max_tokens=140, sampling=GREEDY) for i in range(5, 9)]
    (expected,) = Engine(bard.model, bard.tokenizer).run([requests[1]])
    ids = [engine.add(request) for request in requests]
    events = []
    while engine.scheduler.n_preempted < 2:
        events += engine.step()
    gone = next(group.id for group in engine.scheduler.waiting if group.preempted)
    assert engine.cancel(gone)
    real, failed = type(bard.model).start, []

    def start(model, batch, **more):
        if not failed and len(batch.ids) > 1:
            failed.append(True)
            raise RuntimeError("too much at once")
        return real(model, batch, **more)

    monkeypatch.setattr(type(bard.model), "start", start)
    while engine.busy:
        events += engine.step()
    assert gone not in {event.id for event in events if event.result is not None}
    for id in set(ids) - {gone}:
        (last,) = [event for event in events if event.id == id and event.result is not None]
        pieces = "".join(event.piece for event in events if event.id == id)
        assert pieces == last.result.choices[0].text and len(last.result.choices[0].tokens) == 140
        if id == ids[1]:
            assert last.result == expected
    assert engine.runner.pool.n_used == 0


def test_a_short_request_gets_its_token_at_once_beside_long_ones(bard):
    engine = Engine(
        bard.model, bard.tokenizer, max_rows=8, chunk=512, cache_tokens=1024, state="paged", short_share=0.25
    )
    for i in range(8):
        engine.add(Request((i + 3,) * 200, max_tokens=50, sampling=GREEDY))
    for step in range(30):
        short = engine.add(Request((step + 3, 4), max_tokens=1))
        assert short in {event.id for event in engine.step()}
        assert len(engine.scheduler.waiting) > 2 or step > 20
