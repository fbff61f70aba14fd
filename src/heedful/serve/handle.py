"""Handles to what was submitted to a worker: like futures, with partial results and cancellation.

    GenerationHandle   a request of the engine: its events as they come, and its result
    JobHandle          any other work in the model's thread, such as a batch of embeddings: its result
    HandleGroup        the handles of one HTTP request: awaited together, cancelled together if its client disconnects

A handle belongs to the event loop it was made on. The worker's thread changes it only through that loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, cast

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from heedful.generate.request import Choice, Request, Result
from heedful.generate.sequence import Event
from heedful.generate.turns import Owner
from heedful.serve.errors import ApiError, execution_error, request_id

R = TypeVar("R")
T = TypeVar("T")
MAX_BACKLOG = 32_768  # tokens and alternatives (logprobs) that wait for a client who does not read


class RequestCancelled(Exception):
    """The request was cancelled by its client."""


class Wakeup(asyncio.Event):
    """Set whenever some handles have something new for their reader; counts what it has not read."""

    backlog = 0  # tokens and alternatives of unread events
    blocked = False  # whether the reader waits for its client, who does not read


class Handle(Generic[R]):
    """The future result of something submitted to a worker."""

    def __init__(self, on_cancel: Callable[[Handle[Any]], None], wakeup: Wakeup | None = None) -> None:
        self._on_cancel: Callable[[Handle[Any]], None] | None = on_cancel  # the worker's; None once done
        self._loop = asyncio.get_running_loop()
        self.wakeup = wakeup or Wakeup()  # set whenever there is something new; handles may share it
        self.owner = Owner("", -1)  # the worker's
        self._done = False
        self._value: R | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the result or the error is there."""
        return self._done

    async def result(self) -> R:
        """Wait for the result; raises the error there was."""
        while not self._done:
            self.wakeup.clear()
            await self.wakeup.wait()
        if self._error is not None:
            raise self._error
        return cast(R, self._value)

    def cancel(self) -> None:
        """Give it up, at any time; what has started ends before the engine's next step."""
        if self._on_cancel is not None:
            self._on_cancel(self)
            self._finish(None, RequestCancelled("the request was cancelled"))

    def _finish(self, value: R | None, error: Exception | None) -> None:
        if not self._done:
            self._done, self._value, self._error, self._on_cancel = True, value, error, None
            self.wakeup.set()


class GenerationHandle(Handle[Result]):
    """The handle of an engine request; with `stream` it collects all events, else only the result."""

    def __init__(
        self,
        on_cancel: Callable[[Handle[Any]], None],
        request: Request | None,  # None: answered already
        stream: bool,
        wakeup: Wakeup | None = None,
    ) -> None:
        super().__init__(on_cancel, wakeup)
        self.request, self.stream = request, stream
        self._id = -1  # the engine's number for it, once it is there
        self._submitted: float | None = time.perf_counter()  # None after the first token
        self._unread: list[Event] = []
        self._backlog = 0  # its part of the wakeup's

    async def events(self) -> AsyncIterator[list[Event]]:
        """Lists of all events since the last list; the last event of all has the result, or the error."""
        assert self.stream, "a request that was submitted for its result alone has no events"
        while self._unread or not self._done:
            while not self._unread:
                self.wakeup.clear()
                await self.wakeup.wait()
            yield self.take_events()

    def take_events(self) -> list[Event]:
        """The events since the last call, without waiting."""
        events, self._unread = self._unread, []
        self.wakeup.backlog -= self._backlog
        self._backlog = 0
        return events

    def _deliver(self, events: list[Event]) -> None:
        if self._done:
            return  # cancelled while these were on their way
        if self.stream:
            self._unread += events
            size = sum(1 if event.score is None else 1 + len(event.score.top) for event in events)
            self._backlog += size
            self.wakeup.backlog += size
            if self.wakeup.blocked and self.wakeup.backlog > MAX_BACKLOG:
                return self._give_up()
        if is_last(events[-1]):
            super()._finish(events[-1].result, events[-1].error)
        self.wakeup.set()

    def _give_up(self) -> None:
        """End a stream whose client does not read, and forget what it has not read."""
        if self._on_cancel is not None:
            self._on_cancel(self)
        self.take_events()
        message = f"the client is {MAX_BACKLOG:,} tokens and alternatives behind: read faster, or ask for less"
        self._finish(None, ApiError(400, message, code="slow_reader"))

    def _finish(self, value: Result | None, error: Exception | None) -> None:
        """An end that the engine has no event for."""
        if not self._done and self.stream:
            self._unread.append(Event(self._id, 0, None, "", finish_reason="error", error=error))
        super()._finish(value, error)


def empty_result(n: int, wakeup: Wakeup) -> GenerationHandle:
    """The handle of n empty answers, done already: what max_tokens 0 asks for needs no engine."""
    events = [Event(0, i, None, "", finish_reason="length") for i in range(n)]
    events[-1].result = Result([Choice(i, [], "", "length") for i in range(n)])
    handle = GenerationHandle(lambda _: None, None, True, wakeup)
    handle._deliver(events)
    return handle


def is_last(event: Event) -> bool:
    """Whether it is the last event of its request."""
    return event.result is not None or event.error is not None


class JobHandle(Handle[list[T]]):
    """The handle of a job: its result is the list of all that the iterator yielded."""

    def __init__(self, on_cancel: Callable[[Handle[Any]], None], job: Iterator[T]) -> None:
        super().__init__(on_cancel)
        self._job = job
        self._yielded: list[T] = []

    def _close(self) -> None:
        close = getattr(self._job, "close", None)  # as generators have it
        if close is not None:
            close()
        self._yielded = []


def client_of(http: HttpRequest) -> str:
    """Whose turn a request takes in a model's queue: its API key's, or without keys its address's."""
    key = http.scope.get("state", {}).get("key")
    return f"key {key}" if key is not None else str((http.scope.get("client") or ("",))[0])


H = TypeVar("H", bound=Handle[Any], covariant=True)


class HandleGroup(Generic[H]):
    """The handles of one HTTP request, all with the same `wakeup`. The only place that watches for a disconnect."""

    def __init__(self, handles: Sequence[H]) -> None:
        self.handles, self.wakeup = handles, handles[0].wakeup
        assert all(handle.wakeup is self.wakeup for handle in handles), "the handles of a group wake it together"
        self.disconnected = False

    @asynccontextmanager
    async def cancelled_on_disconnect(self, receive: Receive) -> AsyncIterator[None]:
        """Cancel the handles when the client disconnects; at the end of the block, those that are not done."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self._cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._cancel()
        self.wakeup.set()

    def _cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()

    async def results(self: HandleGroup[Handle[R]], http: HttpRequest) -> list[R] | None:
        """The results of all handles, None if the client disconnected; ApiError for what failed."""
        async with self.cancelled_on_disconnect(http.receive):
            try:
                for handle in self.handles:
                    while not (handle.done or self.disconnected):
                        self.wakeup.clear()
                        await self.wakeup.wait()
                return None if self.disconnected else [await handle.result() for handle in self.handles]
            except Exception as error:
                raise execution_error(error, request_id(http.scope)) from None
