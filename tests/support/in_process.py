"""The server's application in this process, without a socket: real models and workers, and messages of the test's."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from heedful.generate.model_runner import ModelRunner
from heedful.loaded import Loaded
from heedful.serve.app import create_app
from heedful.serve.metrics import Metrics
from heedful.serve.options import Options
from heedful.serve.worker import Worker


class LoadedManager:
    """A model manager whose models are loaded already."""

    def __init__(self, models: tuple[Loaded, ...], **settings: Any) -> None:
        self.names = tuple(loaded.name for loaded in models)
        self.workers = {loaded.name: Worker(loaded, **settings) for loaded in models}
        self.n_users, self.metrics = 0, Metrics()
        for worker in self.workers.values():
            worker.start()

    @asynccontextmanager
    async def acquire(self, name: str | None):
        if (name is None and len(self.names) > 1) or (name is not None and name not in self.workers):
            raise LookupError(f"there is no model {name!r}")
        self.n_users += 1
        try:
            yield self.workers[name or self.names[0]]
        finally:
            self.n_users -= 1

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop()


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        return b"".join(self.messages).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def chunks(self) -> list[Any]:
        """The JSON of a stream's events, which ends in [DONE]."""
        assert self.status == 200 and self.headers["content-type"].startswith("text/event-stream"), self.text
        events = self.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and self.complete
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]

    def said(self, index: int = 0) -> str:
        """The text of one choice of a stream."""
        choices = [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]
        return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


async def until(condition) -> None:
    """Wait for the worker's thread to get there."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


class Gate:
    """The model's thread waits here before each pass, until it is let through."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.n_asked = 0
        self._open, through = threading.Semaphore(0), getattr(ModelRunner, name)

        def gated(*args):
            self.n_asked += 1
            assert self._open.acquire(timeout=30)
            return through(*args)

        monkeypatch.setattr(ModelRunner, name, gated)

    def let(self, n: int) -> None:
        self._open.release(n)


class InProcessServer:
    """An application that lives as long as this; `settings` are the workers'."""

    def __init__(self, *models: Loaded, options: Options | None = None, **settings: Any) -> None:
        self.runner = asyncio.Runner()
        self.runner.get_loop()
        self.manager = LoadedManager(models, **settings)
        self.app = create_app(self.manager, options or Options())  # type: ignore[arg-type]

    def __enter__(self) -> InProcessServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.manager.stop())
        self.runner.close()

    def post(self, path: str, **body: Any) -> Answer:
        return self.runner.run(self.exchange(path, body))

    def complete(self, prompt: Any = None, **body: Any) -> Answer:
        return self.post("/v1/completions", prompt=prompt, **body)

    def chat(self, content: str, **body: Any) -> Answer:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    async def exchange(
        self, path: str, body: Any, *, leave: asyncio.Event | None = None, on_body: Any = None
    ) -> Answer:
        """One request. The client goes away when `leave` is set; `on_body` is awaited with every message."""
        answer, pending = Answer(), [{"type": "http.request", "body": json.dumps(body).encode()}]
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000),
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                answer.messages.append(message.get("body", b""))
                answer.complete = not message.get("more_body", False)
                if on_body is not None:
                    await on_body(answer)

        await self.app(scope, receive, send)
        return answer
