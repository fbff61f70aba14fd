"""The HTTP protocol of a connection: uvicorn's, with limits on the size of headers and on the time that a request takes
to arrive, and with error bodies like all others."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from heedful.serve.errors import ApiError

MAX_HEADER_BYTES = 64 * 2**10  # bytes of a request before its body
HEADERS_TOO_LARGE = ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES:,} bytes")
RECEIVE_TIMEOUT = 300.0  # seconds from the first byte of a request to its last


class Protocol(HttpToolsProtocol):
    """One connection: bytes in, ASGI requests out, and back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers, self._n_headers, self._n_messages = True, 0, 0
        self._parse_error = ApiError(400, "this is not valid HTTP")
        self._receive_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timeout at once: a connection that stays silent is closed like an idle one."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request, counting those of its headers and the time it takes."""
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(RECEIVE_TIMEOUT, self._timed_out)
        before, n_messages = self._in_headers, self._n_messages
        super().data_received(data)
        # The parser buffers an unfinished header: its size can only be seen here.
        only_headers = before and self._in_headers and n_messages == self._n_messages
        self._n_headers = self._n_headers + len(data) if only_headers else 0
        if self._n_headers > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._send_error(HEADERS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, unless its headers are too large."""
        self._in_headers = False
        self._n_messages += 1
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._parse_error = HEADERS_TOO_LARGE
            raise ValueError(HEADERS_TOO_LARGE.message)  # out of the parser, which calls send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body has arrived."""
        super().on_message_complete()
        self._in_headers = True
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _timed_out(self) -> None:
        """The request took too long to arrive (slowloris): 408, or if a response has started, just close."""
        responding = not self._in_headers and self.cycle is not None and self.cycle.response_started
        if responding or self.transport.is_closing():
            self.transport.close()
        else:
            self._send_error(ApiError(408, f"the request has not arrived within {RECEIVE_TIMEOUT:.0f} seconds"))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for a request that cannot be parsed."""
        self._send_error(self._parse_error)

    def _send_error(self, error: ApiError) -> None:
        body = error.encoded()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
