"""A client of the server's application, without a socket between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2 as httpx

from heedful.serve.app import create_app
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options


@asynccontextmanager
async def async_client(*names, pooling=None, **options):
    """A client of an application with these models; `pooling` is what the first one's files would say."""
    chosen = Options(**options)
    manager = ModelManager(names or ("bert-books",), chosen, Metrics())
    app = create_app(manager, chosen)
    if pooling is not None:
        (await manager.worker(manager.names[0])).loaded.pooling = pooling
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            client.app = app
            yield client
    finally:
        await manager.stop()


class SyncClient:
    """An async_client for tests that are not asynchronous: its event loop runs in a thread."""

    def __init__(self, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.loop = client, loop

    def __call__(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        sent = asyncio.run_coroutine_threadsafe(self.client.request(method, path, **more), self.loop)
        reply = sent.result(60)
        return reply.status_code, reply.json()


@contextmanager
def sync_client(*names, pooling=None, **options) -> Iterator[SyncClient]:
    """A client of an application with these models, as async_client has it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    held = async_client(*names, pooling=pooling, **options)
    try:
        client = asyncio.run_coroutine_threadsafe(held.__aenter__(), loop).result(60)
        yield SyncClient(client, loop)
        asyncio.run_coroutine_threadsafe(held.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
