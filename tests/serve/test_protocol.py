"""One connection, byte by byte: what is not HTTP, headers without end; and the socket that all of them come to."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from heedful.serve import protocol as protocol_of
from heedful.serve.protocol import MAX_HEADER_BYTES, Protocol
from heedful.serve.server import bind

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


class Wire(asyncio.Transport):
    """What was sent back on a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data):
        self.sent += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def taking_all(scope, receive, send):
    """Says how many bytes the body had."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def talk(*parts: bytes) -> Wire:
    """A connection on which these bytes arrive, one part at a time."""

    async def main() -> Wire:
        config = uvicorn.Config(taking_all, http=Protocol, log_config=None, lifespan="off")
        wire, state = Wire(), ServerState()
        protocol = Protocol(config=config, server_state=state, app_state={})
        protocol.connection_made(wire)
        for part in parts:
            if wire.closed:
                break
            protocol.data_received(part)
            await asyncio.sleep(0)  # time for timers
        if wire.closed:
            protocol.connection_lost(None)
        while state.tasks:
            await asyncio.gather(*state.tasks)
        protocol.connection_lost(None)
        return wire

    return asyncio.run(main())


def error_of(wire: Wire) -> tuple[int, dict[str, str]]:
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    assert wire.closed and b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "junk",
    [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /\x00 HTTP/1.1\r\n\r\n"],
)
def test_what_is_not_http_is_told_so_in_the_shape(junk):
    status, error = error_of(talk(junk))
    assert status == 400 and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"x: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n"],
        [HEAD + b"x: ", *[b"a" * 1000] * 100],
        [HEAD, *[b"x: %d\r\n" % i for i in range(20_000)]],
        [b"GET /", *[b"a" * 1000] * 100],
    ],
    ids=["at once", "one without end", "many without end", "a path without end"],
)
def test_headers_have_a_limit(parts):
    assert error_of(talk(*parts))[0] == 431


def test_bodies_are_no_headers():
    """In any cut of the bytes, and for several requests on a connection."""
    size = 3 * MAX_HEADER_BYTES
    whole = HEAD + b"content-length: %d\r\n\r\n" % size + b"x" * size
    for parts in ([whole], [whole[:40], whole[40:]], [whole[:-1], whole[-1:]], [whole[:90], whole[90:]]):
        assert talk(*parts).sent.count(b"200 OK") == 1
    assert talk(whole, whole, whole).sent.count(b"200 OK") == 3


@pytest.mark.parametrize(
    "part", [HEAD, HEAD + b"content-length: 9\r\n\r\nabc", b"\r\n"], ids=["head", "body", "nothing"]
)
def test_a_request_that_never_arrives_is_not_waited_for(part, monkeypatch):
    monkeypatch.setattr(protocol_of, "RECEIVE_TIMEOUT", 0.0)
    status, error = error_of(talk(part, b""))
    assert status == 408 and "has not arrived" in error["message"]


def test_who_has_sent_all_may_wait_for_the_answer(monkeypatch):
    monkeypatch.setattr(protocol_of, "RECEIVE_TIMEOUT", 0.0)
    assert talk(HEAD + b"content-length: 3\r\n\r\nabc").sent.count(b"200 OK") == 1


def test_a_port_in_use_is_told_in_one_line():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is in use: choose another"):
            bind("127.0.0.1", port)


def test_any_address_of_this_machine_will_do():
    with bind("localhost", 0) as listener:
        assert listener.family in (socket.AF_INET, socket.AF_INET6) and listener.getsockname()[1] > 0
    with pytest.raises(ValueError, match="cannot be used"):
        bind("192.0.2.1", 0)
