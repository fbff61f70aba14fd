"""The engine's requests of one HTTP request, while they are answered.

They are put in line together and given up together: by an error, or when the client goes away, whom we watch from the
moment it waits for the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

from starlette.types import Receive

from heedful.generate.request import Choice, Result
from heedful.generate.sequence import Event
from heedful.serve.asks import Part
from heedful.serve.worker import Worker


class Waiting(Protocol):
    """What a reply needs of a handle."""

    @property
    def ended(self) -> bool: ...
    def take(self) -> list[Event]: ...
    async def result(self) -> Result: ...
    def cancel(self) -> None: ...


class Silence:
    """The answer to max_tokens 0: nothing, at once, without a model."""

    ended = True

    def __init__(self, n: int) -> None:
        self._result = Result([Choice(i, [], "", "length") for i in range(n)])
        self._fresh = [Event(0, i, None, "", finish_reason="length") for i in range(n)]
        self._fresh[-1].result = self._result

    def take(self) -> list[Event]:
        events, self._fresh = self._fresh, []
        return events

    async def result(self) -> Result:
        return self._result

    def cancel(self) -> None:
        pass


class Asking:
    """The engine's requests of one HTTP request, from when they are put in line until they end or are given up."""

    def __init__(self, worker: Worker, parts: Sequence[Part], *, every_token: bool) -> None:
        self.parts = parts
        self.bell = asyncio.Event()  # something came, or the client went
        self.bell.set()
        self.gone = False
        requests = [part.request for part in parts if part.request is not None]
        self.handles: list[Waiting] = [Silence(part.n) for part in parts]
        if requests:  # then all of them have one
            self.handles = [*worker.submit_all(requests, every_token=every_token, bell=self.bell)]

    async def watch(self, receive: Receive) -> None:
        """Give all up when the client goes away."""
        message: MutableMapping[str, Any] = {}
        while message.get("type") != "http.disconnect":
            message = await receive()
        self.gone = True
        self.cancel()
        self.bell.set()

    async def results(self) -> list[Result]:
        """Wait for all of them; raises the first one's error. Nothing if the client went away."""
        for handle in self.handles:
            while not (handle.ended or self.gone):
                self.bell.clear()
                await self.bell.wait()
        return [] if self.gone else [await handle.result() for handle in self.handles]

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()
