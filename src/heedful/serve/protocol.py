"""The HTTP protocol of a connection: uvicorn's, with limits and with error bodies like all others.

Limits: the number of connections, the size of headers, the time that a request takes to arrive, and the time in which a
client that does not read keeps its response in memory. A response to an HTTP/1.0 client, which knows no chunks, ends
where the connection is closed.

A request that offers an upgrade (h2c, websocket) is answered as if it had not. Framing that two parsers could read
differently is refused, and the connection closed: no byte of a body may be read as the next request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from heedful.serve.errors import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGISendCallable, ASGISendEvent

MAX_HEADER_BYTES = 64 * 2**10  # bytes of a request before its body
HEADERS_TOO_LARGE = ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES:,} bytes")
NO_CONNECT = ApiError(405, "CONNECT asks for a proxy, which this is not", headers={"allow": "GET, HEAD, POST"})
NOT_CHUNKED = ApiError(
    501, "of transfer codings only `chunked` is supported: send the body without the others", code="not_implemented"
)
RECEIVE_TIMEOUT = 300.0  # seconds from the first byte of a request to its last
WRITE_TIMEOUT = 30.0  # seconds in which a client reads MIN_READ bytes of what waits for it
MIN_READ = 64 * 2**10
REFUSED_KEEP_ALIVE = 5  # seconds for the first request of a connection that is one too many


class Protocol(HttpToolsProtocol):
    """One connection: bytes in, ASGI requests out, and back."""

    def __init__(self, *args: Any, max_connections: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_headers, self._n_headers, self._n_messages = True, 0, 0
        self._parse_error = ApiError(400, "this is not valid HTTP")
        self._refusal: ApiError | None = None  # of every request of this connection
        self._receive_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timeout at once: a connection that stays silent is closed like an idle one."""
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self.timeout_keep_alive = min(self.timeout_keep_alive, REFUSED_KEEP_ALIVE)
            message = f"this server has {self._max_connections} connections already: try again later"
            self._refusal = ApiError(429, message, code="too_many_connections")
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._stop_write_timer()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request, counting those of its headers and the time it takes."""
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(RECEIVE_TIMEOUT, self._timed_out)
        before, n_messages = self._in_headers, self._n_messages
        self._parse(data)
        # The parser buffers an unfinished header: its size can only be seen here.
        only_headers = before and self._in_headers and n_messages == self._n_messages
        self._n_headers = self._n_headers + len(data) if only_headers else 0
        if self._n_headers > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._send_error(HEADERS_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        """Give bytes to the parser. Where it stops at an offered upgrade, take the offer out and parse that again."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                data = self._head_without_upgrade() + data[stop.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except httptools.HttpParserError:
                return self.send_400_response("")
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """The request line and headers that were parsed last, without what offers an upgrade."""
        version = self.parser.get_http_version().encode("ascii")
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; those after the body (trailers) are ignored."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, unless its headers are too large or its framing is ambiguous."""
        refusal = self._refuse_headers()
        if refusal is None and self.parser.should_upgrade():
            return  # `_parse` parses it again
        self._in_headers = False
        self._n_messages += 1
        if refusal is not None:
            self._parse_error = refusal
            raise ValueError(refusal.message)  # out of the parser, which calls send_400_response
        super().on_headers_complete()
        cycle = self.cycle
        if self.parser.get_http_version() == "1.0":
            cycle.waiting_for_100_continue = False
            cycle.send = UnchunkedSend(cycle, cycle.send)  # type: ignore[method-assign]
        elif self.expect_100_continue:
            cycle.send = close_unless_continued(cycle, cycle.send)  # type: ignore[method-assign,assignment]

    def _refuse_headers(self) -> ApiError | None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            return HEADERS_TOO_LARGE
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() == "1.0"):
            return NOT_CHUNKED
        if self.parser.get_method() == b"CONNECT":
            return NO_CONNECT
        return self._refusal

    def on_message_complete(self) -> None:
        """The body has arrived."""
        if self._in_headers:
            return  # an upgrade was offered: nothing of the body was read yet
        super().on_message_complete()
        self._in_headers = True
        self._stop_timer()

    # --- clients that do not read ------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The write buffer is full: from now on the client must read."""
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        """The client has read nearly all of it."""
        super().resume_writing()
        self._stop_write_timer()

    def on_response_complete(self) -> None:
        """The response is written, and if the connection is to be closed, the client must read the rest of it."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writes()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_writes()

    def _watch_writes(self) -> None:
        """Abort the connection unless the buffer, to which nothing is added now, gets smaller."""
        if self._write_timer is None:
            size = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self._check_writes, size)

    def _check_writes(self, before: int) -> None:
        self._write_timer = None
        size = self.transport.get_write_buffer_size()
        if size > before - MIN_READ and size > 0:
            self.transport.abort()
        elif size > 0:
            self._watch_writes()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

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
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        more = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()).encode("latin-1")
        self.transport.write(STATUS_LINE[error.status] + head + more + b"\r\n" + body)
        self.transport.close()
        self._watch_writes()


def close_unless_continued(cycle: RequestResponseCycle, send: ASGISendCallable) -> ASGISendCallable:
    """The ASGI `send` of a request with `Expect: 100-continue`. A client that is refused before it was told to continue
    may leave out the body or send it: only the end of the connection makes clear what follows."""

    async def send_or_close(message: ASGISendEvent) -> None:
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    return send_or_close


class UnchunkedSend:
    """The ASGI `send` of an HTTP/1.0 request: a body whose length is not known ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle, send: ASGISendCallable) -> None:
        self.cycle, self.send = cycle, send
        self._unchunked = False

    async def __call__(self, message: ASGISendEvent) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
            names = {name.lower() for name, _ in headers}
            self._unchunked = b"content-length" not in names and self.cycle.scope["method"] != "HEAD"
            if self._unchunked:
                self.cycle.response_started = True
                lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
                self.cycle.transport.write(STATUS_LINE[message["status"]] + lines + b"connection: close\r\n\r\n")
                return
        if not self._unchunked or message["type"] != "http.response.body":
            return await self.send(message)
        if self.cycle.flow.write_paused and not self.cycle.disconnected:
            await self.cycle.flow.drain()
        if self.cycle.disconnected:
            return
        self.cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.cycle.response_complete = True
            self.cycle.message_event.set()
            self.cycle.transport.close()
            self.cycle.on_response()
