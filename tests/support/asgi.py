"""Requests to an ASGI application without a socket, with every message of the request chosen by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DISCONNECT = {"type": "http.disconnect"}


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    n_received: int  # messages of the request that the application asked for

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has all four keys and nothing beside."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


def request(
    app: Any,
    method: str = "GET",
    path: str = "/",
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    *,
    host: str = "localhost:8000",
    content_type: str | None = "application/json",
) -> Response:
    """One request and the whole answer to it; a body of several parts comes in several messages."""
    parts = iter([body] if isinstance(body, bytes) else body)
    given = {"host": host, **(headers or {})}
    if method == "POST" and content_type is not None:
        given.setdefault("content-type", content_type)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8000), "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    upcoming = next(parts, b"")
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal upcoming, received
        received += 1
        if upcoming is None:
            return DISCONNECT
        part, upcoming = upcoming, next(parts, None)
        return {"type": "http.request", "body": part, "more_body": upcoming is not None}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start = sent[0]
    found = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    return Response(start["status"], found, b"".join(m.get("body", b"") for m in sent[1:]), received)
