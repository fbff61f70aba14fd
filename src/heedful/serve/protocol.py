"""The HTTP protocol with bounds: uvicorn's, with limits on the headers and on the time that a request takes to arrive,
and errors in the shape of all the others."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from heedful.serve.errors import ApiError

MAX_HEADER_BYTES = 64 * 2**10  # bytes of a request before its body
TOO_LARGE = ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES:,} bytes")
ARRIVAL = 300.0  # seconds from the first byte of a request to its last


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers, self._n_headers, self._n_messages = True, 0, 0
        self._problem = ApiError(400, "this is not valid HTTP")
        self._arriving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # One that connects and says nothing is not kept longer than one that has said all.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._arrived()

    def data_received(self, data: bytes) -> None:
        if self._arriving is None:
            self._arriving = self.loop.call_later(ARRIVAL, self._late)
        before, n_messages = self._in_headers, self._n_messages
        super().data_received(data)
        # The parser keeps an unfinished header to itself: only here can its size be seen.
        only_headers = before and self._in_headers and n_messages == self._n_messages
        self._n_headers = self._n_headers + len(data) if only_headers else 0
        if self._n_headers > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._n_messages += 1
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._problem = TOO_LARGE
            raise ValueError(TOO_LARGE.message)  # out of the parser, which calls send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._arrived()

    def _arrived(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _late(self) -> None:
        """Whoever sends a byte now and then does not keep the connection. An answer that has begun is cut short."""
        answering = not self._in_headers and self.cycle is not None and self.cycle.response_started
        if answering or self.transport.is_closing():
            self.transport.close()
        else:
            self._refuse(ApiError(408, f"the request has not arrived within {ARRIVAL:.0f} seconds"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._problem)

    def _refuse(self, error: ApiError) -> None:
        body = error.encoded()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
