"""A worker: the event loop and the model's thread, with real threads and no waiting by the clock."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import torch

from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.generate.sequence import Event, SequenceGroup
from heedful.kernels.accelerate import accelerate
from heedful.loaded import Loaded
from heedful.serve.errors import Overloaded, ShuttingDown
from heedful.serve.handle import GenerationHandle, RequestCancelled
from heedful.serve.metrics import Metrics
from heedful.serve.worker import Worker
from heedful.text import byte_tokens
from support.tiny import tiny

GREEDY = Sampling(temperature=0)


def make_request(prompt=(1, 2, 3), max_tokens=4, **more) -> Request:
    return Request(tuple(prompt), max_tokens=max_tokens, sampling=GREEDY, **more)


def make_loaded(family="llama", **changes) -> Loaded:
    return Loaded(tiny(family, **changes).eval(), None, "small")


@asynccontextmanager
async def running_worker(loaded=None, **settings):
    worker = Worker(loaded or make_loaded(), **settings)
    worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def all_events(handle: GenerationHandle) -> list[Event]:
    return [event async for events in handle.events() for event in events]


def n_alive() -> int:
    """Requests that somebody still holds."""
    gc.collect()
    return sum(type(o) in (GenerationHandle, SequenceGroup) for o in gc.get_objects())


class Gate:
    """Stops the model before each of its passes until it is let through."""

    def __init__(self, model) -> None:
        self.model, self.real = model, model.step
        self.entered, self.pass_on = threading.Semaphore(0), threading.Semaphore(0)
        self.rows: list[int] = []
        model.step = self

    def __call__(self, tokens, state, **more):
        self.rows.append(len(tokens))
        self.entered.release()
        assert self.pass_on.acquire(timeout=30)
        return self.real(tokens, state, **more)

    async def reached(self) -> None:
        """The model is about to make its next pass."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=30)

    def once(self) -> None:
        self.pass_on.release()

    def open(self) -> None:
        self.model.step = self.real
        self.pass_on.release(1000)


# --- answers ---------------------------------------------------------------------------------------------------------


def mixed(n: int, source: bool) -> list[Request]:
    """Of all lengths, with shared beginnings, several answers, stop tokens and texts, scores and echoes."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for i in range(n):
        ids = torch.randint(3, 61, (int(torch.randint(1, 40, (), generator=draw)),), generator=draw).tolist()
        ids = [*range(5, 5 + i % 20), *ids][:44]
        more = [{}, {"n": 3}, {"logprobs": 2}, {"stop": ("\x0b",)}, {"n": 1, "best_of": 2}][i % 5]
        more |= {"echo": True} if i % 7 == 0 and not source else {}
        read = {"prompt": (), "source": tuple(ids)} if source else {"prompt": tuple(ids)}
        how = {"sampling": GREEDY, "stop_ids": frozenset({i % 61})}
        found.append(Request(**read, max_tokens=1 + i % 12, **how, **more))
    return found


@pytest.mark.parametrize(
    ("family", "packed"), [("llama", False), ("gpt", True), ("transformer", True), ("seq2seq", False)]
)
def test_a_hundred_at_once_get_what_each_gets_alone(family, packed):
    loaded = Loaded(tiny(family).eval(), byte_tokens(), "small")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(0.3)  # of a usual size, with which float32 is about exact
    if packed:
        accelerate(loaded.model, "inference", precision="float32")
    requests = mixed(100, source=not loaded.continues_prompt)
    alone = [Engine(loaded.model, loaded.tokenizer).run([request])[0] for request in requests]

    async def main():
        async with running_worker(loaded, max_rows=16, chunk=64) as worker:
            handles = [worker.submit(r, stream=i % 2 == 0) for i, r in enumerate(requests)]
            reading = [all_events(handle) for handle in handles[::2]]
            heard, results = await asyncio.gather(
                asyncio.gather(*reading), asyncio.gather(*(t.result() for t in handles))
            )
            assert not worker.busy and worker.n_waiting == worker.n_running == 0
        return heard, results

    heard, results = asyncio.run(main())
    for request, got, expected in zip(requests, results, alone, strict=True):
        for one, other in zip(got.choices, expected.choices, strict=True):
            assert (one.tokens, one.text, one.finish_reason) == (
                other.tokens,
                other.text,
                other.finish_reason,
            )
            if request.logprobs is not None:
                close = [pytest.approx(score.logprob, abs=1e-4) for score in other.scores]
                assert [score.logprob for score in one.scores] == close
    for events, result in zip(heard, results[::2], strict=True):
        assert events[-1].result == result and all(event.result is None for event in events[:-1])
        if len({event.index for event in events}) == len(result.choices):
            for choice in result.choices:
                assert "".join(event.piece for event in events if event.index == choice.index) == choice.text


def test_a_reader_that_is_slow_gets_a_longer_list_and_holds_up_nobody():
    async def main():
        async with running_worker() as worker:
            slow = worker.submit(make_request(max_tokens=9), stream=True)
            for _ in range(5):
                await worker.submit(make_request(max_tokens=9), stream=False).result()
            lists = [events async for events in slow.events()]
            assert len(lists) == 1 and len(lists[0]) == 9 and lists[0][-1].result is not None

    asyncio.run(main())


def test_what_could_never_be_answered_is_refused_at_once():
    async def main():
        worker = Worker(make_loaded("gpt"), max_rows=2, cache_tokens=48)  # not even started
        for request, word in [
            (make_request(()), "empty"),
            (make_request([61]), "vocabulary"),
            (make_request(range(60)), "cache_tokens"),
            (make_request([1] * 65), "65 tokens"),
            (make_request(n=3), "max_rows"),
            (make_request(best_of=3), "max_rows"),
            (Request(source=(1,)), "source"),
        ]:
            with pytest.raises(ValueError, match=word):
                worker.submit(request, stream=False)
        assert worker.n_waiting == 0
        with pytest.raises(ValueError, match=r"cannot generate; it can: .*embed"):
            Worker(make_loaded("bert")).submit(make_request(), stream=False)

    asyncio.run(main())


def test_a_full_line_is_busy():
    async def main():
        loaded = make_loaded()
        gate = Gate(loaded.model)
        async with running_worker(loaded, max_rows=1, queue=3) as worker:
            handles = [worker.submit(make_request(), stream=False)]
            await gate.reached()  # the first has left the line
            assert (worker.n_waiting, worker.n_running) == (0, 1)
            handles += [worker.submit(make_request(), stream=False) for _ in range(3)]
            with pytest.raises(Overloaded, match="3 requests wait"):
                worker.submit(make_request(), stream=False)
            with pytest.raises(Overloaded):
                worker.run_job(iter([1]))
            gate.once()
            await gate.reached()  # now they wait in the engine
            with pytest.raises(Overloaded):
                worker.submit(make_request(), stream=False)
            handles.pop().cancel()
            gate.once()
            await gate.reached()
            handles.append(worker.submit(make_request(), stream=False))
            gate.open()
            assert len({tuple((await t.result()).choices[0].tokens) for t in handles}) == 1

    asyncio.run(main())


# --- clients ---------------------------------------------------------------------------------------------------------


def test_a_request_of_thousands_of_prompts_counts_once_in_the_queue_and_takes_turns():
    async def main():
        loaded = make_loaded()
        gate = Gate(loaded.model)
        async with running_worker(loaded, max_rows=4, queue=3) as worker:
            many = worker.submit_all([make_request()] * 500, stream=False, client="a")
            await gate.reached()
            done = []
            singles = [worker.submit(make_request(max_tokens=1), stream=False, client=c) for c in "abab"]
            with pytest.raises(Overloaded, match="3 requests wait"):  # with the many
                worker.submit(make_request(), stream=False, client="a")
            singles.append(worker.submit(make_request(max_tokens=1), stream=False, client="b"))
            gate.open()
            for single in singles:
                await single.result()
                done.append(sum(handle.done for handle in many))
            assert max(done) < 100
            assert len({tuple((await handle.result()).choices[0].tokens) for handle in many}) == 1

    asyncio.run(main())


def test_prompts_that_wait_are_bounded_and_a_single_one_is_never_refused_for_them(monkeypatch):
    monkeypatch.setattr("heedful.serve.worker.MAX_UNANSWERED", 100)

    async def main():
        worker = Worker(make_loaded(), queue=50)  # not even started
        worker.submit_all([make_request()] * 60, stream=False, client="a")  # 180 tokens, but nobody else waits
        for client in "ab":
            with pytest.raises(Overloaded, match="180 tokens of prompts wait"):
                worker.submit_all([make_request()] * 2, stream=False, client=client)
            worker.submit(make_request(), stream=False, client=client)
        await worker.stop()

    asyncio.run(main())


# --- going away ------------------------------------------------------------------------------------------------------


def test_who_leaves_the_inbox_never_reaches_the_engine():
    async def main():
        loaded = make_loaded()
        gate = Gate(loaded.model)
        async with running_worker(loaded) as worker:
            first = worker.submit(make_request([9]), stream=False)
            await gate.reached()
            later = [worker.submit(make_request([8]), stream=i % 2 == 0) for i in range(200)]
            for handle in later:
                handle.cancel()
                handle.cancel()
            assert worker.n_waiting == 0
            gate.open()
            await first.result()
            with pytest.raises(RequestCancelled):
                await later[1].result()
            assert isinstance((await all_events(later[0]))[-1].error, RequestCancelled)
            assert set(gate.rows) == {1}

    asyncio.run(main())


def test_a_place_is_free_before_the_next_step():
    async def main():
        loaded = make_loaded()
        gate = Gate(loaded.model)
        async with running_worker(loaded, max_rows=3, chunk=8) as worker:
            speaking = [worker.submit(make_request([i], 30), stream=True) for i in (1, 2)]
            for _ in range(3):  # two prompts, one token for each
                await gate.reached()
                gate.once()
            await gate.reached()
            assert gate.rows[-1] == 2
            reading = worker.submit(make_request(range(40)), stream=True)  # five steps of 8
            gate.once()
            for _ in range(2):
                await gate.reached()
                gate.once()
            await gate.reached()
            speaking[0].cancel()
            reading.cancel()
            assert worker.n_running == 3
            gate.once()
            while gate.rows[-1] != 1 or worker.n_running != 1:
                await gate.reached()
                gate.once()
            at = len(gate.rows)
            await gate.reached()
            assert set(gate.rows[at - 1 :]) == {1}
            gate.open()
            assert len(await all_events(speaking[1])) == 30

    asyncio.run(main())


def test_hundreds_go_away_in_line_in_the_prompt_and_while_speaking():
    async def main():
        loaded = make_loaded()
        async with running_worker(loaded, max_rows=4, chunk=8, queue=10_000) as worker:
            expected = (await worker.submit(make_request(), stream=False).result()).choices[0].tokens
            for cycle in range(20):
                handles = [worker.submit(make_request(range(30), 30), stream=True) for _ in range(20)]
                lists = handles[cycle % 3].events()
                if cycle % 2:
                    await anext(lists)  # it speaks
                await lists.aclose()
                for handle in handles:
                    handle.cancel()
            assert (await worker.submit(make_request(), stream=False).result()).choices[0].tokens == expected
            assert not worker.busy and worker._engine.runner.pool.n_used == 0
            del handles, handle, lists
            assert n_alive() == 0

    asyncio.run(main())


def test_thousands_of_cancels_leave_nothing_behind():
    async def main():
        async with running_worker(queue=10_000) as worker:
            for _ in range(3000):
                worker.submit(make_request(), stream=True).cancel()
            for _ in range(100):
                await worker.submit(make_request(max_tokens=1), stream=False).result()
            assert not worker._inbox and not worker._cancelled and not worker._in_engine and not worker._outbox
            assert n_alive() == 0

    asyncio.run(main())


def test_a_loop_that_is_gone_stops_nothing():
    loaded = make_loaded()
    gate = Gate(loaded.model)
    worker = Worker(loaded)
    worker.start()

    async def leave():
        worker.submit(make_request(max_tokens=50), stream=True)
        worker.submit(make_request(max_tokens=50), stream=False)
        await gate.reached()

    async def come():
        handle = worker.submit(make_request(), stream=False)
        gate.open()
        assert len((await handle.result()).choices[0].tokens) == 4
        await worker.stop()

    asyncio.run(leave())
    asyncio.run(come())


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [RuntimeError("no"), ValueError("no"), MemoryError("no")])
def test_a_pass_that_raises_is_the_servers_fault_and_the_next_request_works(problem, caplog):
    async def main():
        loaded = make_loaded()
        real = loaded.model.step

        def broken(tokens, state, **more):
            raise problem

        async with running_worker(loaded) as worker:
            expected = await worker.submit(make_request(), stream=False).result()
            for every in (True, False):
                loaded.model.step = broken
                handle = worker.submit(make_request(), stream=every)
                with pytest.raises(MemoryError if isinstance(problem, MemoryError) else RuntimeError, match="no"):
                    await handle.result()
                loaded.model.step = real
                assert await worker.submit(make_request(), stream=False).result() == expected
            assert worker._engine.runner.pool.n_used == 0

    asyncio.run(main())
    assert "a pass of small failed" in caplog.text and "in broken" in caplog.text


def test_an_engine_that_fails_is_made_anew(caplog):
    async def main():
        loaded = make_loaded()
        gate = Gate(loaded.model)
        async with running_worker(loaded, max_rows=2) as worker:
            running = [worker.submit(make_request(max_tokens=40), stream=i == 0) for i in range(2)]
            await gate.reached()
            waiting = worker.submit(make_request(), stream=False)
            gate.once()
            await gate.reached()  # it waits in the engine now

            def broken():
                raise AssertionError("a mistake")

            worker._engine.step = broken
            gate.open()
            events = await all_events(running[0])
            assert isinstance(events[-1].error, AssertionError) and events[0].token is not None
            with pytest.raises(AssertionError):
                await running[1].result()
            again = await worker.submit(make_request(), stream=False).result()
            assert await waiting.result() == again

    asyncio.run(main())


def test_what_the_engine_refuses_later_is_the_requests_own_error():
    async def main():
        async with running_worker() as worker:

            def add(request, owner):
                raise ValueError("not this one")

            real, worker._engine.add = worker._engine.add, add
            with pytest.raises(ValueError, match="not this one"):
                await worker.submit(make_request(), stream=False).result()
            worker._engine.add = real
            await worker.submit(make_request(), stream=False).result()

    asyncio.run(main())


@pytest.mark.parametrize("started", [True, False])
def test_stopping_tells_all_who_are_left(started):
    async def main():
        loaded = make_loaded()
        gate = Gate(loaded.model)
        worker = Worker(loaded, max_rows=1)
        if started:
            worker.start()
        handles = [worker.submit(make_request(max_tokens=9), stream=True) for _ in range(3)]
        work = worker.run_job(iter([1]))
        if started:
            await gate.reached()
            late = worker.submit(make_request(), stream=True)
            stopping = asyncio.ensure_future(worker.stop())
            await asyncio.sleep(0)
            gate.open()
            await stopping
            handles.append(late)
        else:
            await worker.stop()
        for handle in handles:
            assert isinstance((await all_events(handle))[-1].error, ShuttingDown)
            handle.cancel()
        with pytest.raises(ShuttingDown):
            await work.result()
        for late in (lambda: worker.submit(make_request(), stream=False), lambda: worker.run_job(iter([1]))):
            with pytest.raises(ShuttingDown):
                late()
        await worker.stop()
        assert not worker.busy

    asyncio.run(main())


# --- other work ------------------------------------------------------------------------------------------------------


def test_steps_and_jobs_take_turns():
    async def main():
        loaded = make_loaded()
        order = []
        real = loaded.model.step

        def step(tokens, state, **more):
            order.append("step")
            return real(tokens, state, **more)

        def job(name, n):
            for i in range(n):
                order.append(name)
                yield i

        worker = Worker(loaded)
        loaded.model.step = step
        handle = worker.submit(make_request(max_tokens=12), stream=False)
        works = [worker.run_job(job("a", 4)), worker.run_job(job("b", 2)), worker.run_job(job("a", 0))]
        worker.start()
        assert [await work.result() for work in works] == [[0, 1, 2, 3], [0, 1], []]
        await handle.result()
        await worker.stop()
        turns = [name for name in order if name != "step"]
        assert turns == ["a", "b", "a", "b", "a", "a"]
        assert not any(one != "step" and other != "step" for one, other in pairwise(order))

    asyncio.run(main())


def test_a_job_can_fail_and_be_given_up(caplog):
    caplog.set_level(logging.CRITICAL)

    async def main():
        closed_by, began, go_on = [], threading.Event(), threading.Event()

        def failing():
            yield 1
            raise ValueError("a layer said so")

        def long():
            try:
                while True:
                    began.set()
                    assert go_on.wait(30)
                    yield 0
            finally:
                closed_by.append(threading.current_thread().name)

        async with running_worker(make_loaded("bert")) as worker:
            with pytest.raises(RuntimeError, match="a layer said so"):
                await worker.run_job(failing()).result()
            work, never = worker.run_job(long()), worker.run_job(failing())
            await asyncio.to_thread(began.wait, 30)
            work.cancel()
            never.cancel()
            go_on.set()
            assert await worker.run_job(iter("ab")).result() == ["a", "b"]
            assert closed_by == ["model small"] and not worker.busy
            with pytest.raises(RequestCancelled):
                await work.result()

    asyncio.run(main())


def test_the_metrics_count():
    async def main():
        metrics = Metrics()
        loaded = make_loaded()
        gate = Gate(loaded.model)
        async with running_worker(loaded, metrics=metrics) as worker:
            gone = worker.submit(make_request([7], 50), stream=False)
            await gate.reached()
            gone.cancel()
            handle = worker.submit(make_request([1, 2, 3], 4), stream=False)
            gate.open()
            await handle.result()
        text = metrics.render().decode()
        assert 'heedful_generated_tokens_total{model="small"} 5.0' in text
        assert 'heedful_prompt_tokens_total{model="small"} 4.0' in text
        assert 'heedful_cancelled_requests_total{model="small"} 1.0' in text
        for name in ("running_rows", "waiting_requests", "cache_used_tokens", "cache_size_tokens"):
            assert f'heedful_{name}{{model="small"}}' in text
        assert 'heedful_time_to_first_token_seconds_count{model="small"} 2.0' in text

    asyncio.run(main())
