"""Batches: requests by the thousand, answered by the server's own application, without a socket between.

Many are in flight, so that the engine's continuous batching is full. What a request is answered is what it would be
over HTTP; only where the server would say "try again later" is it tried again here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

from starlette.types import Message

from heedful.serve.app import create_app
from heedful.serve.batch_files import BatchAnswer, BatchRequest
from heedful.serve.errors import ApiError
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.text.parse import parse_json

RETRY = 0.5  # seconds until a request is tried again that there is no memory for
UNLIMITED = 2**31  # requests in the engine's queue: the number in flight is the limit here


class BatchClient:
    """Asks the server's application, in this process. An asynchronous context manager, which stops the models."""

    def __init__(self, options: Options) -> None:
        self.options = replace(options, queue=UNLIMITED)
        self.manager = ModelManager(options.models, self.options, Metrics())
        self.app = create_app(self.manager, self.options)

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.stop()

    @property
    def n_in_flight(self) -> int:
        """Requests at once that keep the engine's batch full: those in it, and as many to follow."""
        return 2 * self.options.max_rows

    async def answer(self, request: BatchRequest) -> BatchAnswer:
        """The answer to a request, which may be an error."""
        if request.problem is not None:
            return BatchAnswer(request, 400, f"req_{uuid.uuid4().hex}", ApiError(400, request.problem).body())
        while True:
            status, request_id, body = await self._post(request.url, request.body)
            if status != 429:
                return BatchAnswer(request, status, request_id, parse_json(body))
            await asyncio.sleep(RETRY)  # another model is in use, and there is no memory for both

    async def _post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """The status, the request id and the body of a response."""
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, request_id, parts = 500, "", list[bytes]()

        async def receive() -> Message:
            return pending.pop() if pending else await asyncio.Future[Any]()  # nobody disconnects

        async def send(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message["headers"])[b"x-request-id"].decode("ascii")
            else:
                parts.append(message.get("body", b""))

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode("ascii"), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
        }  # fmt: skip
        await self.app(scope, receive, send)
        return status, request_id, b"".join(parts)


async def answer_batch(
    requests: Iterator[BatchRequest], options: Options, write: Callable[[BatchAnswer], None]
) -> None:
    """Answer all requests with the models of this process; `write` gets the answers in the order they are done."""
    async with BatchClient(options) as client:

        async def answer_next() -> None:
            for request in requests:
                write(await client.answer(request))

        await run_together(answer_next() for _ in range(client.n_in_flight))


async def run_together(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run tasks to their end. When one fails, the others are cancelled before its exception is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
