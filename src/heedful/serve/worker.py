"""The engine thread: a worker owns a model, its engine and the thread that runs them, for use from an event loop.

The engine belongs to one thread, and the event loop must never wait for a forward pass. So submissions wait in an inbox
that the thread empties before every step, and the events of a step go back in one call to the loop, for all requests
together. Between two steps one batch of another job (embeddings, activations) runs, if there is any. What waits takes
turns: clients, each client's submissions, and the prompts of each (`heedful.generate.turns`).

    event loop  submit, run_job ──► inbox ──► engine.add, engine.step, next(job)   thread
                cancel ──► cancelled ──► engine.cancel
                handle ◄── one call_soon_threadsafe per step ◄── events

The lock is held for moments, never during a step. Nothing waits for a client: what it has not read yet stays in its
handle, and a handle whose event loop is closed counts as cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

from heedful.generate.engine import Engine
from heedful.generate.grammar import Grammar
from heedful.generate.leader import LeadingEngine
from heedful.generate.matcher import GrammarFailed, new_matcher
from heedful.generate.request import Request
from heedful.generate.sampling import InvalidLogits
from heedful.generate.sequence import Event
from heedful.generate.turns import Owner
from heedful.kernels.cpu.memory import trim_memory
from heedful.loaded import Loaded
from heedful.models.base import GenerativeModel
from heedful.serve.errors import Overloaded, ShuttingDown
from heedful.serve.handle import GenerationHandle, Handle, JobHandle, Wakeup, is_last
from heedful.serve.metrics import Metrics
from heedful.weights.load import is_sharded

R = TypeVar("R")
T = TypeVar("T")

log = logging.getLogger(__name__)

SHORT_SHARE = 0.25  # of the rows and of the KV cache is kept for short requests
TRIM = 10.0  # seconds between two returns of freed memory to the system
MAX_UNANSWERED = 2**20  # prompt tokens of all unanswered submissions of several prompts: tens of MB


class Worker:
    """A model, its engine and their thread. All public methods are for the event loop."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        max_rows: int = 64,
        queue: int = 256,
        cache_tokens: int | None = None,
        chunk: int = 1024,
        step_time: float = 0.5,
        metrics: Metrics | None = None,
    ) -> None:
        self.loaded, self.queue = loaded, queue
        self.chat_encoders = asyncio.Semaphore(2)  # threads that a slow chat template may hold at once
        self._compilers = asyncio.Semaphore(2)  # threads that compile grammars
        self._settings: dict[str, Any] = {
            "max_rows": max_rows, "chunk": chunk, "step_time": step_time, "cache_tokens": cache_tokens,
            "short_share": SHORT_SHARE,
        }  # fmt: skip
        self._is_divided = any(map(is_sharded, loaded.model.parameters()))
        self._metrics = None if metrics is None else metrics.model(loaded.name)
        self._n_prefilled, self._n_generated, self._n_preempted = 0, 0, 0  # reported to the metrics
        self._last_step = 0.0  # when
        self._last_trim = time.perf_counter()
        self._engine = self._make_engine()
        self._thread: threading.Thread | None = None
        # The lock protects these three and the engine's replacement; the rest belongs to the thread.
        self._condition = threading.Condition()
        self._inbox: dict[Handle[Any], None] = {}  # in the order they came
        self._cancelled: list[Handle[Any]] = []
        self._stopping = False
        self._submissions = count()
        self._of_several: list[list[GenerationHandle]] = []  # submissions of several prompts, on the event loop
        self._in_engine: dict[int, GenerationHandle] = {}  # by the engine's number for them
        self._jobs: deque[JobHandle[Any]] = deque()
        self._outbox: list[tuple[Handle[Any], Callable[[], None]]] = []  # to be called on the handles' loops

    def _make_engine(self) -> Engine | None:
        """None for a model that does not generate. Paged where the model can be, to share common prefixes."""
        if "generate" not in self.loaded.abilities:
            return None
        tokenizer = None if self.loaded.tokenizer is None else self.loaded.tokenizer.target
        model = cast(GenerativeModel[Any], self.loaded.model)
        kind = LeadingEngine if self._is_divided else Engine
        try:
            return kind(model, tokenizer, state="paged", **self._settings)
        except ValueError:
            return kind(model, tokenizer, state="contiguous", **self._settings)

    # --- on the event loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        assert self._thread is None, "a worker starts once"
        self._thread = threading.Thread(target=self._run, name=f"model {self.loaded.name}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; what is unfinished fails with ShuttingDown."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is None:
            self._shut_down()
        else:
            await asyncio.to_thread(self._thread.join)

    def submit(self, request: Request, *, stream: bool, client: str = "") -> GenerationHandle:
        """Queue a request. ValueError if it could never run, Overloaded if the client's queue is full."""
        return self.submit_all([request], stream=stream, client=client)[0]

    def submit_all(self, requests: Sequence[Request], *, stream: bool, client: str = "") -> list[GenerationHandle]:
        """Queue several, all or none, with one `wakeup`; in the client's queue they count as one."""
        engine = self._require_engine()
        for request in requests:
            engine.check(request)
        if len(requests) > 1:
            self._check_unanswered(requests, client)
        wakeup = Wakeup()
        handles = [GenerationHandle(self._cancel, request, stream, wakeup) for request in requests]
        self._enqueue(handles, client)
        if len(handles) > 1:
            self._of_several.append(handles)
        return handles

    def _check_unanswered(self, requests: Sequence[Request], client: str) -> None:
        """Overloaded if submissions of several prompts take too much memory; a single one is always accepted."""
        self._of_several = [some for some in self._of_several if not all(handle.done for handle in reversed(some))]
        taken = [(some[0].owner.client, n_tokens(handle.request for handle in some)) for some in self._of_several]
        of_all, own = sum(n for _, n in taken), sum(n for other, n in taken if other == client)
        new = n_tokens(requests)
        if (taken and of_all + new > MAX_UNANSWERED) or (own and own + new > MAX_UNANSWERED / 2):
            raise Overloaded(
                f"{of_all} tokens of prompts wait for {self.loaded.name} in requests of several prompts: "
                "try again later, or send fewer at once"
            )

    async def compile_grammar(self, grammar: Grammar, *, at_start: bool) -> None:
        """Compile a grammar beside the event loop; requests that have it then find it. ValueError if it is wrong."""
        tokenizer = self._require_engine().tokenizer
        async with self._compilers:
            await asyncio.to_thread(new_matcher, tokenizer, grammar, (), at_start=at_start)

    def run_job(self, job: Iterator[T], *, client: str = "") -> JobHandle[T]:
        """Queue other work: the thread calls `next` on it once between two steps, in turns with other jobs."""
        if self._is_divided:
            raise ValueError(f"{self.loaded.name} is divided over processes, which generate and do nothing else")
        handle = JobHandle(self._cancel, job)
        self._enqueue([handle], client)
        return handle

    def _require_engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            self.loaded.require("generate")
            raise ShuttingDown(f"{self.loaded.name} is being stopped")
        return engine

    @property
    def max_context(self) -> int | None:
        """Most tokens of a prompt and its answer together, by the model's positions and the cache; None: no limit."""
        engine = self._require_engine()
        block = 1 if engine.runner.pool is None else engine.runner.pool.block_size
        cached = (
            None if engine.scheduler.max_cache_tokens is None else engine.scheduler.max_cache_tokens // block * block
        )
        return min((n for n in (self.loaded.model.context_length, cached) if n is not None), default=None)

    def max_answers(self, request: Request) -> int:
        """How many answers to one prompt fit into a batch and the cache; more take several requests."""
        engine = self._require_engine()
        scheduler, size = engine.scheduler, engine.runner.cache_tokens(replace(request, n=1))
        return max(1, int(min(scheduler.most_rows, scheduler.most_cache_tokens // size)))

    def _enqueue(self, handles: Sequence[Handle[Any]], client: str) -> None:
        owner = Owner(client, next(self._submissions))
        for handle in handles:
            handle.owner = owner
        with self._condition:
            if self._stopping:
                raise ShuttingDown(f"{self.loaded.name} is being stopped")
            if (waiting := self._count_submissions(client)) >= self.queue:
                raise Overloaded(f"{waiting} requests wait for {self.loaded.name} already: try again later")
            self._inbox |= dict.fromkeys(handles)
            self._condition.notify()

    def _cancel(self, handle: Handle[Any]) -> None:
        with self._condition:
            if handle in self._inbox:
                del self._inbox[handle]
                self._count_cancelled()
            elif not self._stopping:
                self._cancelled.append(handle)
                self._condition.notify()

    @property
    def n_waiting(self) -> int:
        """Requests whose prefill has not begun, and other jobs."""
        with self._condition:
            return self._count_waiting()

    @property
    def n_running(self) -> int:
        """Requests in prefill or decoding."""
        engine = self._engine
        return 0 if engine is None else len(engine.scheduler.running)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        with self._condition:
            return bool(self._inbox or self._in_engine or self._jobs)

    def _count_waiting(self) -> int:
        engine = self._engine
        in_engine = 0 if engine is None else len(engine.scheduler.waiting)
        return len(self._inbox) + in_engine + len(self._jobs)

    def _count_submissions(self, client: str) -> int:
        """A client's submissions with prompts that wait, and its other jobs."""
        engine = self._engine
        in_engine = 0 if engine is None else engine.scheduler.waiting.n_submissions(client)
        arriving = {handle.owner for handle in self._inbox if handle.owner.client == client}
        return len(arriving) + in_engine + sum(handle.owner.client == client for handle in list(self._jobs))

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._process_inbox():
                self._trim_memory()
                self._step()
                self._flush_outbox()
                self._update_metrics()
                self._step_job()
                self._flush_outbox()
        except BaseException:
            log.exception("the thread of %s has ended: a mistake in heedful", self.loaded.name)
        finally:
            self._shut_down()

    def _trim_memory(self) -> None:
        """Return what earlier steps freed to the system, now and then: malloc keeps most of it."""
        if (now := time.perf_counter()) - self._last_trim > TRIM:
            trim_memory()
            self._last_trim = now

    def _process_inbox(self) -> bool:
        """Wait until there is something to do, drop what was cancelled, admit what was submitted. False: stop."""
        with self._condition:
            while not (self._stopping or self._inbox or self._cancelled or self._in_engine or self._jobs):
                self._condition.wait()
            if self._stopping:
                return False
            cancelled, self._cancelled = self._cancelled, []
        for handle in cancelled:
            self._drop(handle)
        while self._inbox:
            with self._condition:  # released after each, so that the event loop never waits for all of them
                if self._inbox:
                    handle = next(iter(self._inbox))
                    self._admit(handle)
                    del self._inbox[handle]
        return True

    def _admit(self, handle: Handle[Any]) -> None:
        if isinstance(handle, JobHandle):
            self._jobs.append(handle)
            return
        assert isinstance(handle, GenerationHandle) and handle.request is not None and self._engine is not None
        try:
            handle._id = self._engine.add(handle.request, handle.owner)
        except Exception as error:
            self._post_result(handle, None, error)
        else:
            self._in_engine[handle._id] = handle

    def _drop(self, handle: Handle[Any]) -> None:
        """Remove what was cancelled."""
        if isinstance(handle, JobHandle) and handle in self._jobs:
            self._jobs.remove(handle)
            self._close_job(handle)
            self._count_cancelled()
        elif isinstance(handle, GenerationHandle) and self._in_engine.pop(handle._id, None) is not None:
            assert self._engine is not None
            self._count_cancelled()
            try:
                self._engine.cancel(handle._id)
            except Exception as error:
                self._replace_engine(error)

    def _close_job(self, handle: JobHandle[Any]) -> None:
        try:
            handle._close()
        except Exception:
            log.exception("a job of %s could not be ended well", self.loaded.name)

    def _step(self) -> None:
        """A step of the engine; its events go to the outbox."""
        if not self._in_engine:
            return
        assert self._engine is not None
        try:
            events = self._engine.step()
        except Exception as error:
            return self._replace_engine(error)
        by_handle: dict[GenerationHandle, list[Event]] = {}
        for event in events:
            handle = self._in_engine.get(event.id)
            if handle is None:
                continue
            self._count_token(handle, event)
            if is_last(event):
                del self._in_engine[event.id]
                event.error = None if event.error is None else self._server_error(event.error)
            elif not handle.stream:
                continue
            by_handle.setdefault(handle, []).append(event)
        self._outbox += [(handle, partial(handle._deliver, its)) for handle, its in by_handle.items()]

    def _step_job(self) -> None:
        """One `next` of the job whose turn it is."""
        if not self._jobs:
            return
        handle = self._jobs[0]
        try:
            handle._yielded.append(next(handle._job))
        except StopIteration:
            self._jobs.popleft()
            self._post_result(handle, handle._yielded, None)
        except Exception as error:
            self._jobs.popleft()
            self._post_result(handle, None, self._server_error(error))
        else:
            self._jobs.rotate(-1)

    def _replace_engine(self, error: Exception) -> None:
        """The engine itself failed: make a new one. Requests that have begun get the error; others move to the new."""
        assert self._engine is not None
        error = self._server_error(error)
        scheduler = self._engine.scheduler
        waiting = {group.id for group in scheduler.waiting if not group.preempted} if scheduler.running else set()
        handles, self._in_engine = self._in_engine, {}
        with self._condition:
            self._engine, self._n_prefilled, self._n_preempted = self._make_engine(), 0, 0
            for id, handle in handles.items():
                if id in waiting:
                    self._admit(handle)
                else:
                    self._post_result(handle, None, error)

    def _server_error(self, error: Exception) -> Exception:
        """Log an error of a forward pass, and strip its traceback, which would keep the tensors of the pass alive.

        Requests were validated before, so a ValueError here is no client's mistake: it becomes a RuntimeError.
        """
        if error.__traceback__ is not None:  # several requests may share it
            log.error("a pass of %s failed", self.loaded.name, exc_info=error)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        like_a_clients = isinstance(error, ValueError | LookupError) and not isinstance(
            error, InvalidLogits | GrammarFailed
        )
        return RuntimeError(str(error)) if like_a_clients else error

    def _count_token(self, handle: GenerationHandle, event: Event) -> None:
        if event.token is not None and self._metrics is not None:
            self._n_generated += 1
            if handle._submitted is not None:
                self._metrics.first_token(time.perf_counter() - handle._submitted)
                handle._submitted = None

    def _count_cancelled(self) -> None:
        if self._metrics is not None:
            self._metrics.cancelled()

    def _update_metrics(self) -> None:
        """Report what the step did, and what is running and waiting now."""
        if self._metrics is None or self._engine is None:
            return
        runner, scheduler, now = self._engine.runner, self._engine.scheduler, time.perf_counter()
        self._metrics.step(
            running=self.n_running,
            waiting=self._count_waiting(),
            rows=sum(group.n_rows for group in scheduler.running),
            prompt_tokens=runner.n_prefilled - self._n_prefilled,
            generated_tokens=self._n_generated,
            preempted=scheduler.n_preempted - self._n_preempted,
        )
        if self._n_generated and self._last_step:
            self._metrics.next_token(now - self._last_step)
        self._last_step = now if self._in_engine else 0.0
        self._n_prefilled, self._n_generated, self._n_preempted = runner.n_prefilled, 0, scheduler.n_preempted
        if runner.pool is not None:
            size = runner.pool.block_size
            self._metrics.cache(runner.pool.n_used * size, runner.pool.n_blocks * size)
        elif scheduler.max_cache_tokens is not None:
            self._metrics.cache(sum(group.held_tokens for group in scheduler.running), scheduler.max_cache_tokens)

    def _post_result(self, handle: Handle[R], value: R | None, error: Exception | None) -> None:
        self._outbox.append((handle, partial(handle._finish, value, error)))

    def _flush_outbox(self) -> None:
        """Call everything in the outbox on its handle's event loop, with one call per loop."""
        outbox, self._outbox = self._outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Handle[Any], Callable[[], None]]]] = {}
        for entry in outbox:
            by_loop.setdefault(entry[0]._loop, []).append(entry)
        for loop, entries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, [call for _, call in entries])
            except RuntimeError:  # the loop is closed, and with it all its clients are gone
                for handle, _ in entries:
                    self._drop(handle)

    def _shut_down(self) -> None:
        with self._condition:
            self._stopping = True
            left = [*self._inbox, *self._in_engine.values(), *self._jobs]
            self._inbox, self._in_engine, self._cancelled = {}, {}, []
            self._engine = None
        for handle in left:
            if isinstance(handle, JobHandle):
                self._close_job(handle)
            self._post_result(handle, None, ShuttingDown(f"{self.loaded.name} is being stopped"))
        self._jobs.clear()
        self._flush_outbox()


def n_tokens(requests: Iterable[Request | None]) -> int:
    """Tokens of the prompts and sources."""
    return sum(len(request.prompt) + len(request.source or ()) for request in requests if request is not None)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
