"""One connection, byte by byte: what is not HTTP, headers without end, offers to upgrade, ambiguous framing; and the
socket that all of them come to."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess

import pytest
import uvicorn
from uvicorn.server import ServerState

from heedful.serve import protocol as protocol_of
from heedful.serve.protocol import MAX_HEADER_BYTES, Protocol
from heedful.serve.server import bind
from support.serving import PATIENCE, Server

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


# --- where a body ends, by the real server ----------------------------------------------------------------------------


BODY = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 1, "temperature": 0}).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n" % len(BODY)
JSON = b"content-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
LAST = GET + b"connection: close\r\n\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
WEBSOCKET = (
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def sent_to(server: Server, *parts: bytes) -> bytes:
    """All that comes back on one connection until the server closes it."""
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, b"upgrade: foo/2\r\nConnection: upgrade\r\n"])
@pytest.mark.parametrize("body", [LENGTH + b"\r\n" + BODY, b"transfer-encoding: chunked\r\n\r\n" + CHUNKED])
def test_an_offered_upgrade_is_as_if_it_were_not_there(server, offer, body):
    """The body is read whole, and what follows on the connection is the next request; in any cut of the bytes."""
    plain = statuses_and_text(sent_to(server, HEAD + JSON + body, LAST))
    request = HEAD + offer + JSON + body
    assert statuses_and_text(sent_to(server, request, LAST)) == plain and plain[0] == [200, 200]
    assert statuses_and_text(sent_to(server, request + LAST)) == plain
    assert statuses_and_text(sent_to(server, *[request[i : i + 1] for i in range(len(request))], LAST)) == plain


def statuses_and_text(received: bytes) -> tuple[list[int], list[bytes]]:
    return statuses(received), re.findall(rb'"text":"([^"]*)"', received)


def test_many_offers_on_one_connection(server):
    assert statuses(sent_to(server, (GET + H2C + b"\r\n") * 1500 + LAST)) == [200] * 1501


def test_a_body_behind_an_offer_is_no_request(server):
    """Which it was: the bytes of a body got an answer of their own."""
    hidden = GET + b"x-request-id: hidden\r\n\r\n"
    request = HEAD + H2C + JSON + b"content-length: %d\r\n\r\n" % len(hidden) + hidden
    received = sent_to(server, request, LAST)
    assert statuses(received) == [400, 200] and b"hidden" not in received


CURL = shutil.which("curl")


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
def test_curl_offers_http2(server):
    done = subprocess.run(
        [str(CURL), "--silent", "--noproxy", "*", "--http2", f"{server.url}/v1/completions", "--data-binary", BODY],
        capture_output=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED, 501),
        (b"transfer-encoding: chunked, chunked\r\n\r\n" + CHUNKED, 400),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED, 501),
        (b"transfer-encoding: gzip\r\n\r\n" + BODY, 501),
        (b"transfer-encoding: identity\r\n" + LENGTH + b"\r\n" + BODY, 400),
        (b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED, 400),
        (b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED, 501),
        (b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED, 400),
        (LENGTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED, 400),
        (LENGTH + LENGTH + b"\r\n" + BODY, 400),
        (LENGTH + b"content-length: 1\r\n\r\n" + BODY, 400),
        (b"content-length: 1, 1\r\n\r\n" + BODY, 400),
        (b"content-length: +5\r\n\r\n" + BODY, 400),
        (b"content-length: -1\r\n\r\n" + BODY, 400),
        (b"content-length : 5\r\n\r\n" + BODY, 400),
        (b"x: y\r\n " + LENGTH + b"\r\n" + BODY, 400),
        (b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("offer", [b"", H2C], ids=["plain", "upgrade"])
def test_ambiguous_framing_is_refused_and_the_connection_closed(server, framing, status, offer):
    received = sent_to(server, HEAD + JSON + offer + framing + LAST)
    assert statuses(received) == [status], received
    assert set(json.loads(received.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


def test_http_1_0_knows_no_chunks_and_connect_no_upgrade(server):
    old = HEAD.replace(b"1.1", b"1.0") + JSON
    assert statuses(sent_to(server, old + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED)) == [501]
    assert statuses(sent_to(server, old + H2C + LENGTH + b"\r\n" + BODY)) == [200]
    received = sent_to(server, b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n" + LAST)
    assert statuses(received) == [405] and b"\r\nallow: " in received


def test_fields_after_a_body_are_no_headers(server):
    """A proxy in front has not seen them as such."""
    trailers = CHUNKED[:-2] + b"content-type: text/html\r\nhost: evil.example\r\n\r\n"
    request = HEAD + JSON + b"transfer-encoding: chunked\r\n\r\n" + trailers
    assert statuses(sent_to(server, request + LAST)) == [200, 200]


def test_continue_is_said_once_and_a_refusal_ends_the_connection(server):
    expecting = HEAD + JSON + b"expect: 100-continue\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(expecting + LENGTH + b"\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY + LAST)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert statuses(received) == [200, 200]
    # Refused by its length alone, the client may leave the body out: what it sends next must not be taken for it.
    received = sent_to(server, expecting + b"content-length: 999999999\r\n\r\n")
    assert statuses(received) == [413] and b"connection: close" in received


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
