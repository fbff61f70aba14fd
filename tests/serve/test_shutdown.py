"""A server that is told to stop: nobody is cut short, and the exit code is 0."""

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

import heedful
from heedful.cli import main
from support.serving import KEY, PATIENCE, Server, events


def open_stream(server: Server, ends: tuple[int, ...], n: int) -> socket.socket:
    bias = {str(end): -100 for end in ends}
    body = {"model": "small", "prompt": "the old dog", "max_tokens": n, "logit_bias": bias, "stream": True}
    return server.open("/v1/completions", body, connection="close")


def read_all(sock: socket.socket) -> bytes:
    got = b""
    while piece := sock.recv(65_536):
        got += piece
    sock.close()
    return got


def unchunked(raw: bytes) -> bytes:
    """The body of a response in chunks."""
    rest, body = raw.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def test_under_load_running_requests_finish(folder):
    ends = heedful.load(folder).eos_ids
    server = Server(folder)
    streams = [open_stream(server, ends, 600) for _ in range(3)]
    with ThreadPoolExecutor(1) as other:
        ask = {
            "model": "small",
            "prompt": "a bird",
            "max_tokens": 600,
            "logit_bias": dict.fromkeys(map(str, ends), -100),
        }
        whole = other.submit(server.post, "/v1/completions", ask)
        server.wait_for(lambda: server.running() == 4, "all to run")
        server.process.send_signal(signal.SIGTERM)
        answers = [events(unchunked(read_all(stream))) for stream in streams]
        assert whole.result().json()["usage"]["completion_tokens"] == 600
    for said in answers:
        assert said[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in "".join(server.said)
    with pytest.raises(OSError):
        socket.create_connection(server.address, timeout=5)


def test_those_that_take_too_long_get_an_error(folder):
    ends = heedful.load(folder).eos_ids
    server = Server(folder, "--drain", "0")
    stream = open_stream(server, ends, 1000)
    server.wait_for(lambda: server.running() == 1, "it to run")
    server.process.send_signal(signal.SIGTERM)
    said = events(unchunked(read_all(stream)))
    assert "stop" in said[-1]["error"]["message"]
    assert server.process.wait(PATIENCE) == 0


def test_being_told_again_and_again_is_no_failure(folder):
    server = Server(folder)
    while server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    assert server.process.returncode == 0


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["no-such-model"], "no-such-model"),
        (["tiny", "--host", "0.0.0.0"], "API key"),
        (["tiny", "tiny"], "two models"),
        (["tiny", "--port", "70000"], "65535"),
    ],
)
def test_what_cannot_be_served_says_why(arguments, problem, capsys):
    assert main(["serve", "--port", "0", *arguments]) != 0
    assert problem in capsys.readouterr().err


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "tiny", "--port", str(taken.getsockname()[1])]) != 0
    assert "in use" in capsys.readouterr().err


def test_a_public_address_has_a_key(locked):
    """It says so when it starts, and where the key came from."""
    assert "0.0.0.0" in locked.said[0] and "HEEDFUL_API_KEY" in locked.said[0] and KEY not in locked.said[0]
