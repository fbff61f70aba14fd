"""A model, its engine and the thread they live in; requests come from the event loop and answers go back to it.

The engine belongs to one thread, and the event loop must never wait for a pass of the model. So requests wait in a
mailbox that the thread empties before every step, and what a step has said goes back with one call of the loop, for
all requests together. Between two steps one batch of other work (embeddings) is done, if there is any.

    loop    submit, run ──► mailbox ──► engine.add, engine.step, next(job)    thread
            cancel      ──► cancelled ──► engine.cancel
            handle      ◄── one call_soon_threadsafe per step ◄── events

The lock is held for moments, never during a step. Nothing waits for a reader: what it has not read yet is kept in its
handle, and a reader whose loop is gone is as one that went away.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from heedful.generate.engine import Engine, Speaker
from heedful.generate.request import Request
from heedful.generate.sampling import InvalidLogits
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.serve.errors import Overloaded, ShuttingDown
from heedful.serve.handle import GenerationHandle, Handle, JobHandle, is_last
from heedful.serve.metrics import Metrics

R = TypeVar("R")
T = TypeVar("T")

log = logging.getLogger(__name__)


class Worker:
    """A model, its engine and the thread they live in. All methods are called from the event loop."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        max_rows: int = 64,
        queue: int = 256,
        cache_tokens: int | None = None,
        chunk: int = 256,
        metrics: Metrics | None = None,
    ) -> None:
        self.loaded, self.queue = loaded, queue
        self._settings: dict[str, Any] = {"max_rows": max_rows, "chunk": chunk, "cache_tokens": cache_tokens}
        self._metrics = None if metrics is None else metrics.model(loaded.name)
        self._n_read, self._n_written, self._last = 0, 0, 0.0  # up to the last step, and when that was
        self._engine = self._make_engine()
        self._thread: threading.Thread | None = None
        # The lock is for these four; the rest belongs to the thread.
        self._condition = threading.Condition()
        self._mailbox: dict[Handle[Any], None] = {}  # in the order they came
        self._cancelled: list[Handle[Any]] = []
        self._stopping = False
        self._handles: dict[int, GenerationHandle] = {}  # in the engine, by its number for them
        self._jobs: deque[JobHandle[Any]] = deque()
        self._posts: list[tuple[Handle[Any], Callable[[], None]]] = []  # for the loop

    def _make_engine(self) -> Engine | None:
        """None for a model that does not generate. Paged where the model can: alike beginnings are read once."""
        if "generate" not in self.loaded.abilities:
            return None
        tokenizer = None if self.loaded.tokenizer is None else self.loaded.tokenizer.target
        model = cast(Speaker, self.loaded.model)
        try:
            return Engine(model, tokenizer, state="paged", **self._settings)
        except ValueError:
            return Engine(model, tokenizer, state="contiguous", **self._settings)

    # --- the event loop's side -------------------------------------------------------------------------------------

    def start(self) -> None:
        assert self._thread is None, "a worker starts once"
        self._thread = threading.Thread(target=self._live, name=f"model {self.loaded.name}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step it is in; requests that are left get ShuttingDown."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is None:
            self._leave()
        else:
            await asyncio.to_thread(self._thread.join)

    def submit(self, request: Request, *, every_token: bool) -> GenerationHandle:
        """Put a request in line. ValueError if it could never be answered, Overloaded if the line is full."""
        return self.submit_all([request], every_token=every_token)[0]

    def submit_all(
        self, requests: Sequence[Request], *, every_token: bool, bell: asyncio.Event | None = None
    ) -> list[GenerationHandle]:
        """Put several in line, all or none, behind one bell: however many, they are let in while there is room."""
        engine = self._living()
        for request in requests:
            engine.reader.check(request)
            engine.scheduler.check(request.best_of or request.n, engine.reader.measure(request)[1])
        handles = [GenerationHandle(self._forget, request, every_token, bell) for request in requests]
        self._put(*handles)
        return handles

    def _living(self) -> Engine:
        engine = self._engine
        if engine is None:
            self.loaded.require("generate")
            raise ShuttingDown(f"{self.loaded.name} is being stopped")
        return engine

    @property
    def longest(self) -> int | None:
        """The longest prompt and answer together that the model can read and the engine can hold; None: no limit."""
        engine = self._living()
        block = 1 if engine.reader.pool is None else engine.reader.pool.block
        held = None if engine.scheduler.max_size is None else engine.scheduler.max_size // block * block
        return min((n for n in (self.loaded.model.longest, held) if n is not None), default=None)

    def rows_for(self, request: Request) -> int:
        """How many answers to one prompt can be written at once; more are asked for in parts."""
        scheduler, size = self._living().scheduler, self._living().reader.measure(replace(request, n=1))[1]
        held = scheduler.max_rows if scheduler.max_size is None else scheduler.max_size // size
        return max(1, min(scheduler.max_rows, held))

    def run(self, job: Iterator[T]) -> JobHandle[T]:
        """Put other work in line: one `next` of it between two steps, in turns with other jobs."""
        work = JobHandle(self._forget, job)
        self._put(work)
        return work

    def _put(self, *handles: Handle[Any]) -> None:
        with self._condition:
            if self._stopping:
                raise ShuttingDown(f"{self.loaded.name} is being stopped")
            if (waiting := self._count_waiting()) >= self.queue:
                raise Overloaded(f"{waiting} requests wait for {self.loaded.name} already: try again later")
            self._mailbox |= dict.fromkeys(handles)
            self._condition.notify()

    def _forget(self, place: Handle[Any]) -> None:
        with self._condition:
            if place in self._mailbox:
                del self._mailbox[place]
                self._note_cancelled()
            elif not self._stopping:
                self._cancelled.append(place)
                self._condition.notify()

    @property
    def n_waiting(self) -> int:
        """Requests of which nothing is read yet, and other work."""
        with self._condition:
            return self._count_waiting()

    @property
    def n_running(self) -> int:
        """Requests that are being read or answered."""
        engine = self._engine
        return 0 if engine is None else len(engine.scheduler.active)

    @property
    def busy(self) -> bool:
        with self._condition:
            return bool(self._mailbox or self._handles or self._jobs)

    def _count_waiting(self) -> int:
        engine = self._engine
        in_engine = 0 if engine is None else len(engine.scheduler.waiting)
        return len(self._mailbox) + in_engine + len(self._jobs)

    # --- the thread's side -----------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while self._gather():
                self._step()
                self._hand_over()
                self._report()
                self._work()
                self._hand_over()
        except BaseException:
            log.exception("the thread of %s has ended: a mistake in heedful", self.loaded.name)
        finally:
            self._leave()

    def _gather(self) -> bool:
        """Wait until there is something to do, let go who went away, let in who came. False: stop."""
        with self._condition:
            while not (self._stopping or self._mailbox or self._cancelled or self._handles or self._jobs):
                self._condition.wait()
            if self._stopping:
                return False
            cancelled, self._cancelled = self._cancelled, []
        for place in cancelled:
            self._drop(place)
        while self._mailbox:
            with self._condition:  # anew for each: the loop may have something to say in between
                if self._mailbox:
                    place = next(iter(self._mailbox))
                    self._admit(place)
                    del self._mailbox[place]
        return True

    def _admit(self, place: Handle[Any]) -> None:
        if isinstance(place, JobHandle):
            self._jobs.append(place)
            return
        assert isinstance(place, GenerationHandle) and self._engine is not None
        try:
            place._id = self._engine.add(place.request)
        except Exception as error:
            self._post_end(place, None, error)
        else:
            self._handles[place._id] = place

    def _drop(self, place: Handle[Any]) -> None:
        """Whoever asked went away."""
        if isinstance(place, JobHandle) and place in self._jobs:
            self._jobs.remove(place)
            self._close(place)
            self._note_cancelled()
        elif isinstance(place, GenerationHandle) and self._handles.pop(place._id, None) is not None:
            assert self._engine is not None
            self._note_cancelled()
            try:
                self._engine.cancel(place._id)
            except Exception as error:
                self._renew(error)

    def _close(self, work: JobHandle[Any]) -> None:
        try:
            work._close()
        except Exception:
            log.exception("a job of %s could not be ended well", self.loaded.name)

    def _step(self) -> None:
        if not self._handles:
            return
        assert self._engine is not None
        try:
            events = self._engine.step()
        except Exception as error:
            return self._renew(error)
        said: dict[GenerationHandle, list[Event]] = {}
        for event in events:
            handle = self._handles.get(event.id)
            if handle is None:
                continue
            self._note(handle, event)
            if is_last(event):
                del self._handles[event.id]
                event.error = None if event.error is None else self._fault(event.error)
            elif not handle.every_token:
                continue
            said.setdefault(handle, []).append(event)
        self._posts += [(handle, partial(handle._take, heard)) for handle, heard in said.items()]

    def _work(self) -> None:
        """One batch of the job whose turn it is."""
        if not self._jobs:
            return
        work = self._jobs[0]
        try:
            work._done.append(next(work._job))
        except StopIteration:
            self._jobs.popleft()
            self._post_end(work, work._done, None)
        except Exception as error:
            self._jobs.popleft()
            self._post_end(work, None, self._fault(error))
        else:
            self._jobs.rotate(-1)

    def _renew(self, error: Exception) -> None:
        """The engine itself failed: a new one. Those it was answering have the error; those that waited wait on."""
        assert self._engine is not None
        error = self._fault(error)
        waiting = {task.id for task in self._engine.scheduler.waiting} if self._engine.scheduler.active else set()
        handles, self._handles = self._handles, {}
        with self._condition:
            self._engine, self._n_read = self._make_engine(), 0
            for id, handle in handles.items():
                if id in waiting:
                    self._admit(handle)
                else:
                    self._post_end(handle, None, error)

    def _fault(self, error: Exception) -> Exception:
        """An error to hand out: logged here, without its traceback, which would keep the tensors of the pass alive.

        Requests were checked before, so it is never the asker's, as a ValueError would be.
        """
        if error.__traceback__ is not None:  # several requests may share it
            log.error("a pass of %s failed", self.loaded.name, exc_info=error)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        theirs = isinstance(error, ValueError | LookupError) and not isinstance(error, InvalidLogits)
        return RuntimeError(str(error)) if theirs else error

    def _note(self, handle: GenerationHandle, event: Event) -> None:
        if event.token is not None and self._metrics is not None:
            self._n_written += 1
            if handle._came is not None:
                self._metrics.first_token(time.perf_counter() - handle._came)
                handle._came = None

    def _note_cancelled(self) -> None:
        if self._metrics is not None:
            self._metrics.cancelled()

    def _report(self) -> None:
        """Tell the metrics what the step did, and what is there now."""
        if self._metrics is None or self._engine is None:
            return
        reader, now = self._engine.reader, time.perf_counter()
        self._metrics.step(
            running=self.n_running,
            waiting=self._count_waiting(),
            prompt_tokens=reader.n_read - self._n_read,
            generated_tokens=self._n_written,
        )
        if self._n_written and self._last:
            self._metrics.next_token(now - self._last)
        self._last = now if self._handles else 0.0
        self._n_read, self._n_written = reader.n_read, 0
        if reader.pool is not None:
            self._metrics.cache(reader.pool.n_used * reader.pool.block, reader.pool.n_blocks * reader.pool.block)

    def _post_end(self, place: Handle[R], value: R | None, error: Exception | None) -> None:
        self._posts.append((place, partial(place._end, value, error)))

    def _hand_over(self) -> None:
        posts, self._posts = self._posts, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Handle[Any], Callable[[], None]]]] = {}
        for post in posts:
            by_loop.setdefault(post[0]._loop, []).append(post)
        for loop, its in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, [deliver for _, deliver in its])
            except RuntimeError:  # the loop is closed, and with it all who asked there
                for place, _ in its:
                    self._drop(place)

    def _leave(self) -> None:
        with self._condition:
            self._stopping = True
            left = [*self._mailbox, *self._handles.values(), *self._jobs]
            self._mailbox, self._handles, self._cancelled = {}, {}, []
            self._engine = None
        for place in left:
            if isinstance(place, JobHandle):
                self._close(place)
            self._post_end(place, None, ShuttingDown(f"{self.loaded.name} is being stopped"))
        self._jobs.clear()
        self._hand_over()


def _deliver(posts: list[Callable[[], None]]) -> None:
    for post in posts:
        post()
