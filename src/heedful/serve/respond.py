"""How a reply goes to its client: whole, or as a stream of server-sent events.

Nothing is sent before the engine has said something, so that what fails until then is answered with its own status;
what fails later is the last thing but [DONE] in the stream. A message has whatever was said since the last one. While
there is nothing to say, as a long prompt is read, a comment now and then keeps those on the way from hanging up. A
reader that is slow keeps only itself waiting, and one that goes away is noticed even then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heedful.generate.request import Result
from heedful.generate.sequence import Event
from heedful.serve.asking import Asking
from heedful.serve.asks import Ask, Part, parts_of
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, client_errors, execution_error, request_id
from heedful.serve.replies import Reply
from heedful.serve.worker import Worker

LARGE = 4096  # scores: JSON of more is made beside the event loop

KEEP_ALIVE = 15.0  # seconds without a word
DONE = "data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep it back
]


async def reply_to(
    http: HttpRequest, worker: Worker, ask: Ask, reply: Reply, *, stream: bool, held: AsyncExitStack
) -> Response:
    """Put it in line, and answer at once or as it comes; a stream keeps what is `held` until it ends."""
    with client_errors():
        parts = parts_of(ask, worker, frozenset(worker.loaded.eos_ids))
        asking = Asking(worker, parts, every_token=stream)
    if stream:
        return EventStream(asking, reply, held.pop_all())
    return await reply_whole(http, asking, reply)


async def reply_whole(http: HttpRequest, asking: Asking, reply: Reply) -> Response:
    """Wait for the answers, and for the client to go away."""
    watch = asyncio.create_task(asking.watch(http.receive))
    try:
        results = await asking.results()
    except Exception as error:
        raise execution_error(error, request_id(http.scope)) from None
    finally:
        watch.cancel()
        asking.cancel()
    if asking.gone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if n_scores(results) > LARGE:
        body = await asyncio.to_thread(reply.whole, asking.parts, results)
    else:
        body = reply.whole(asking.parts, results)
    return Response(body, media_type="application/json")


def n_scores(results: Sequence[Result]) -> int:
    """How many log-probabilities are to be abbreviate."""
    answers = sum(len(choice.scores or ()) for result in results for choice in result.choices)
    return answers + sum(len(result.prompt_scores or ()) * len(result.choices) for result in results)


class Telling(Protocol):
    """What makes a stream's lines of what is said."""

    def chunk(self, part: Part, event: Event) -> str: ...
    def end(self) -> str: ...


class EventStream(Response):
    """The response of a stream; `held` is let go at its end."""

    def __init__(self, asking: Asking, reply: Telling, held: AsyncExitStack) -> None:
        super().__init__()
        self.asking, self.reply, self.held = asking, reply, held
        self._started = self._failed = False
        self._spoke = 0.0  # when something was sent last
        self._request_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id, self._spoke = request_id(scope), asyncio.get_running_loop().time()
        watch = asyncio.create_task(self.asking.watch(receive))
        beat = asyncio.create_task(self._beat())
        try:
            await self._tell(send)
        finally:
            watch.cancel()
            beat.cancel()
            self.asking.cancel()
            await self.held.aclose()

    async def _beat(self) -> None:
        """Ring now and then, so that a silence is noticed."""
        while True:
            await asyncio.sleep(KEEP_ALIVE / 4)
            if self._silent:
                self.asking.bell.set()

    @property
    def _silent(self) -> bool:
        return asyncio.get_running_loop().time() - self._spoke >= KEEP_ALIVE

    async def _tell(self, send: Send) -> None:
        asking, over = self.asking, False
        while not over:
            await asking.bell.wait()
            asking.bell.clear()
            if asking.gone:
                return
            lines = self._lines()
            over = self._failed or all(handle.ended for handle in asking.handles)
            if over:
                lines += DONE if self._failed else self.reply.end() + DONE
            if lines:
                await self._send(send, lines.encode(), more=not over)
            elif self._silent:
                await self._send(send, COMMENT, more=True)

    def _lines(self) -> str:
        """What all handles have said since the last time."""
        lines = list[str]()
        for part, handle in zip(self.asking.parts, self.asking.handles, strict=True):
            for event in handle.take():
                if event.error is not None:
                    said = "".join(lines)
                    return said + self._fail(event.error, begun=self._started or bool(said))
                lines.append(self.reply.chunk(part, event))
        return "".join(lines)

    def _fail(self, error: Exception, *, begun: bool) -> str:
        problem = execution_error(error, self._request_id)
        if not begun:
            raise problem
        self._failed = True
        return f"data: {problem.encoded().decode()}\n\n"

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._spoke = asyncio.get_running_loop().time()
