"""A response of server-sent events, as the engine generates them.

Nothing is sent before the engine's first event, so that what fails until then has its own HTTP status; what fails later
is an event at the end of the stream. A server-sent message carries all tokens since the last one: a slow client
delays only itself. A comment now and then keeps proxies from closing a connection that is silent during a long prefill.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heedful.generate.sequence import Event
from heedful.serve.errors import ApiError, execution_error, request_id
from heedful.serve.handle import GenerationHandle, HandleGroup

if TYPE_CHECKING:
    from heedful.serve.generation import SubRequest

KEEP_ALIVE = 15.0  # seconds without an event until a comment is sent
DONE = "data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer it
]


class ChunkFormatter(ABC):
    """What an EventStream sends; a stream ends as OpenAI's do, in [DONE]."""

    @abstractmethod
    def chunk(self, sub: SubRequest, event: Event) -> str:
        """The server-sent events for one event of the engine; may be empty."""

    def final_chunk(self) -> str:
        """The end of a stream."""
        return DONE

    def error_chunk(self, problem: ApiError) -> str:
        """The end of a stream that failed."""
        return f"data: {problem.encoded().decode()}\n\n{DONE}"


class EventStream(Response):
    """A response of server-sent events; it closes its resources at the end."""

    def __init__(
        self,
        group: HandleGroup[GenerationHandle],
        subrequests: Sequence[SubRequest],
        formatter: ChunkFormatter,
        resources: AsyncExitStack,
    ) -> None:
        super().__init__()
        self.group, self.subrequests, self.formatter, self.resources = group, subrequests, formatter, resources
        self._started = self._failed = False
        self._last_sent = 0.0
        self._request_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come until all handles are done, one has failed, or the client disconnects."""
        self._request_id, self._last_sent = request_id(scope), asyncio.get_running_loop().time()
        heartbeat = asyncio.create_task(self._heartbeat())
        async with self.resources, self.group.cancelled_on_disconnect(receive):
            try:
                await self._stream(send)
            finally:
                heartbeat.cancel()

    async def _heartbeat(self) -> None:
        """Wake `_stream` now and then, so that it notices a silence."""
        while True:
            await asyncio.sleep(KEEP_ALIVE / 4)
            if self._silent:
                self.group.wakeup.set()

    @property
    def _silent(self) -> bool:
        return asyncio.get_running_loop().time() - self._last_sent >= KEEP_ALIVE

    async def _stream(self, send: Send) -> None:
        group, over = self.group, False
        while not over:
            await group.wakeup.wait()
            group.wakeup.clear()
            if group.disconnected:
                return
            chunks = self._new_chunks()
            over = self._failed or all(handle.done for handle in group.handles)
            if over and not self._failed:
                chunks += self.formatter.final_chunk()
            if chunks:
                await self._send(send, chunks.encode(), more=not over)
            elif self._silent:
                await self._send(send, COMMENT, more=True)

    def _new_chunks(self) -> str:
        """Chunks for the events of all handles since the last call."""
        chunks = list[str]()
        for sub, handle in zip(self.subrequests, self.group.handles, strict=True):
            for event in handle.take_events():
                if event.error is not None:
                    before = "".join(chunks)
                    return before + self._error_chunk(event.error, started=self._started or bool(before))
                chunks.append(self.formatter.chunk(sub, event))
        return "".join(chunks)

    def _error_chunk(self, error: Exception, *, started: bool) -> str:
        problem = execution_error(error, self._request_id)
        if not started:
            raise problem
        self._failed = True
        return self.formatter.error_chunk(problem)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self.group.wakeup.blocked = True  # until it returns
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.group.wakeup.blocked = False
        self._last_sent = asyncio.get_running_loop().time()
