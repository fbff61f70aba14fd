"""The event loop's side of what a worker was given: a handle waits for what the worker's thread says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Generic, TypeVar, cast

from heedful.generate.request import Request, Result
from heedful.generate.sequence import Event

R = TypeVar("R")
T = TypeVar("T")


class RequestCancelled(Exception):
    """Whoever asked does not want the answer any more."""


class Handle(Generic[R]):
    """One's place in a worker's line, on the event loop's side."""

    def __init__(self, forget: Callable[[Handle[Any]], None], bell: asyncio.Event | None = None) -> None:
        self._forget: Callable[[Handle[Any]], None] | None = forget  # until the end; the worker's
        self._loop = asyncio.get_running_loop()
        self._bell = bell or asyncio.Event()  # something came
        self._ended = False
        self._value: R | None = None
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    async def result(self) -> R:
        """Wait for the end; raises the error there was."""
        while not self._ended:
            self._bell.clear()
            await self._bell.wait()
        if self._error is not None:
            raise self._error
        return cast(R, self._value)

    def cancel(self) -> None:
        """Give the place up, at any time; what was begun ends before the next step."""
        if self._forget is not None:
            self._forget(self)
            self._end(None, RequestCancelled("the request was cancelled"))

    def _end(self, value: R | None, error: Exception | None) -> None:
        if not self._ended:
            self._ended, self._value, self._error, self._forget = True, value, error, None
            self._bell.set()


class GenerationHandle(Handle[Result]):
    """One submitted request. Whoever waits for several at once gives them one bell, and then takes what there is."""

    def __init__(
        self,
        forget: Callable[[Handle[Any]], None],
        request: Request,
        every_token: bool,
        bell: asyncio.Event | None = None,
    ) -> None:
        super().__init__(forget, bell)
        self.request, self.every_token = request, every_token
        self._id = -1  # in the engine, once it is there
        self._came: float | None = time.perf_counter()  # None once the first token is there
        self._fresh: list[Event] = []  # not yet read

    async def events(self) -> AsyncIterator[list[Event]]:
        """All that was said since the last time; the last event of the last list has the result, or the error."""
        assert self.every_token, "a request that was submitted for its result alone has no events"
        while self._fresh or not self._ended:
            while not self._fresh:
                self._bell.clear()
                await self._bell.wait()
            yield self.take()

    def take(self) -> list[Event]:
        """What was said since the last time, without waiting."""
        events, self._fresh = self._fresh, []
        return events

    def _take(self, events: list[Event]) -> None:
        if self._ended:
            return  # cancelled while this was on its way
        if self.every_token:
            self._fresh += events
        if is_last(events[-1]):
            super()._end(events[-1].result, events[-1].error)
        self._bell.set()

    def _end(self, value: Result | None, error: Exception | None) -> None:
        """An end that the engine did not see."""
        if not self._ended and self.every_token:
            self._fresh.append(Event(self._id, 0, None, "", finish_reason="error", error=error))
        super()._end(value, error)


class JobHandle(Handle[list[T]]):
    """JobHandle of another kind: its result is the list of all that the job gave."""

    def __init__(self, forget: Callable[[Handle[Any]], None], job: Iterator[T]) -> None:
        super().__init__(forget)
        self._job = job
        self._done: list[T] = []

    def _close(self) -> None:
        if isinstance(self._job, Generator):
            self._job.close()
        self._done = []


def is_last(event: Event) -> bool:
    """Whether it is the last event of its request."""
    return event.result is not None or event.error is not None
