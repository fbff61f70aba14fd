"""Clients that do not read, too many of them, and old ones, with real sockets and small kernel buffers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from heedful.serve import handle, protocol
from support.serving import ThreadServer, events, serving

COMPLETIONS = "/v1/completions"
LARGE = {"model": "small", "prompt": "the old dog", "max_tokens": 160, "n": 8, "logprobs": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def inside(folder) -> Iterator[ThreadServer]:
    with serving(folder, max_connections=4) as found:
        found._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # connections inherit it
        yield found


def connect(client: ThreadServer, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    """A request from a client whose kernel keeps little for it."""
    sock = socket.socket()
    sock.settimeout(60)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(client.address)
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


def read_all(sock: socket.socket) -> bytes:
    got = b""
    try:
        while piece := sock.recv(65_536):
            got += piece
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize("stream", [True, False])
def test_who_never_reads_is_disconnected(inside, monkeypatch, stream):
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT", 0.05)
    with connect(inside, {**LARGE, "stream": stream}) as sock:
        port = sock.getsockname()[1]
        inside.wait_for(lambda: port in inside.ports, "the connection")
        inside.wait_for(lambda: port not in inside.ports, "it to be disconnected")
        assert not read_all(sock).endswith((b"}", b"0\r\n\r\n"))
    inside.wait_until_idle()


def test_a_stream_that_nobody_reads_ends_before_it_fills_the_memory(inside, monkeypatch):
    monkeypatch.setattr(handle, "MAX_BACKLOG", 300)
    cancelled, written = "heedful_cancelled_requests_total", "heedful_generated_tokens_total"
    before = inside.count(cancelled), inside.count(written)
    with connect(inside, {**LARGE, "max_tokens": 900, "stream": True}) as sock:
        inside.wait_for(lambda: inside.count(cancelled) > before[0], "it to be given up")
        inside.wait_until_idle()
        assert inside.count(written) < before[1] + 8 * 900
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += sock.recv(65_536)
    assert b'"code": "slow_reader"' in got and b"data: [DONE]" in got


def test_a_reader_that_is_slow_but_reads_gets_everything(inside):
    with connect(inside, {**LARGE, "stream": True}) as sock:
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += sock.recv(512)
    assert got.count(b'"finish_reason": "length"') == 8 and b"data: [DONE]" in got


@pytest.mark.parametrize("stream", [True, False])
def test_an_http_1_0_client_gets_no_chunks_and_the_connection_is_closed(inside, stream):
    body = {**LARGE, "n": 1, "logprobs": None, "max_tokens": 9, "temperature": 0, "stream": stream}
    with connect(inside, body, "1.0") as sock:
        head, _, raw = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head
    assert b"transfer-encoding" not in head.lower()
    found = events(raw) if stream else [json.loads(raw)]
    text = "".join(choice["text"] for one in found for choice in one["choices"])
    assert len(text) >= 9 and (stream or b"content-length" in head)


def test_one_connection_too_many_is_told_and_closed(inside):
    inside.http.close()  # its idle connection
    inside.wait_for(lambda: not inside.ports, "no connection")
    idle = [socket.create_connection(inside.address) for _ in range(4)]
    inside.wait_for(lambda: len(inside.ports) == 4, "four connections")
    with connect(inside, {**LARGE, "max_tokens": 1}) as sock:
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    for sock in idle:
        sock.close()
    inside.wait_for(lambda: not inside.ports, "no connection")
    with connect(inside, {**LARGE, "n": 1, "max_tokens": 1}, "1.0") as sock:
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")
