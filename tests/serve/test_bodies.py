"""Whatever a client sends: 4xx in the error shape naming what is wrong, and the server lives on."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

import pytest

from support.serving import KEY, assert_error

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
ASK = {
    COMPLETIONS: {"model": "tiny", "prompt": "To be", "max_tokens": 2},
    CHAT: {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2},
    EMBEDDINGS: {"model": "bert-books", "input": "a cat"},
}
JSON = {"content-type": "application/json"}


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b"",
        b"{",
        b'{"model": "tiny",}',
        b"\xff\xfe{}",
        b'{"model": "tiny"} {}',
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b'{"n": 1' + b"0" * 10_000 + b"}",
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
    ],
    ids=lambda raw: raw[:20].decode("latin-1"),
)
def test_bodies_that_are_no_request(server, path, raw):
    assert_error(server.http.post(path, content=raw, headers=JSON), 400)


@pytest.mark.parametrize("header", ["content-length: 104857600", "transfer-encoding: chunked"])
def test_a_body_of_a_hundred_megabytes(server, header):
    """Said beforehand or not, it is refused before it is read."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{header}\r\n\r\n"
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with socket.create_connection(server.address, timeout=60) as sock:
        sock.sendall(head.encode())
        sent = 0
        try:
            while sent < 100 * 2**20 and not select.select([sock], [], [], 0)[0]:
                sock.sendall(piece)
                sent += len(piece)
            answer = sock.recv(65_536)
            while b"}}" not in answer:
                answer += sock.recv(65_536)
        except ConnectionError:  # it answered and hung up while we were still sending
            answer = b"HTTP/1.1 413 {}"
    assert answer.startswith(b"HTTP/1.1 413") and sent < 20 * 2**20
    if b"error" in answer:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    assert server.complete(**ASK[COMPLETIONS])["choices"]


@pytest.mark.parametrize("path", ASK)
def test_nulls_and_unknown_fields_are_accepted(server, path):
    names = [
        "temperature",
        "stop",
        "n",
        "logit_bias",
        "seed",
        "user",
        "stream",
        "stream_options",
        "logprobs",
        "top_p",
    ]
    body = {**ASK[path], **dict.fromkeys(names), "favourite_colour": "green", "metadata": {"a": "b"}}
    response = server.post(path, body)
    assert response.status_code == 200, response.text


# --- ranges -----------------------------------------------------------------------------------------------------------

SAMPLING: dict[str, tuple[list[Any], str]] = {
    "temperature": ([-0.1, 2.1, "1", True, [1]], "0|2"),
    "top_p": ([-0.1, 1.1, "1"], "0|1"),
    "top_k": ([-2, 1.5, "1"], "1"),
    "min_p": ([-0.1, 1.1], "0|1"),
    "repetition_penalty": ([0, -1], "0"),
    "frequency_penalty": ([-2.1, 2.1, "0"], "2"),
    "presence_penalty": ([-2.1, 2.1], "2"),
    "n": ([0, -1, 129, 1.5, "1", True], "1|128"),
    "seed": (["1", 1.5, 2**64], ""),
    "stop": (["", ["a", ""], list("abcde"), [1], {"a": 1}], ""),
    "logit_bias": ([{"1": 101}, {"1": -101}, {"x": 1}, {"-1": 1}, {"1": "a"}, [], 1], ""),
    "stream": (["true", 1], ""),
    "stream_options": (["yes", {"include_usage": 1}], ""),
    "user": ([1], ""),
    "model": ([1, ["tiny"]], ""),
}
WRONG: dict[str, dict[str, tuple[list[Any], str]]] = {
    COMPLETIONS: {
        **SAMPLING,
        "prompt": ([[], [[]], {}, 1, [1, "a"], [["a"]], [-1], [1.5], [True], [[1], 2]], ""),
        "max_tokens": ([-1, 1.5, "1", True, 2**40], ""),
        "best_of": ([0, 21], "1|20"),
        "logprobs": ([-1, 6, True, "1"], "0|5"),
        "echo": (["true", 1], ""),
        "suffix": (["the end"], ""),
        "engine": ([1], ""),
    },
    CHAT: {
        **SAMPLING,
        "messages": ([[], "hi", [1], [{}], [{"role": "user"}], [{"role": "robot", "content": "a"}]], ""),
        "max_completion_tokens": ([0, -1, 1.5, "1"], "1"),
        "max_tokens": ([0, -1, 1.5], "1"),
        "logprobs": ([1, "true"], ""),
        "top_logprobs": ([21, -1, 1], ""),
        "tools": (["f", [1], [{"type": "function"}], [{"type": "web_search"}]], ""),
        "response_format": ([1, {}, {"type": "yaml"}, {"type": "json_schema", "json_schema": {"schema": 1}}], ""),
        "modalities": ([["text", "audio"]], ""),
    },
    EMBEDDINGS: {
        "input": ([None, [], [[]], {}, 1, ["a"] * 2049, [1, "a"], [-1]], ""),
        "encoding_format": (["int8", 1], ""),
        "dimensions": ([0, -1, 1.5, 10**6], ""),
        "model": ([1], ""),
    },
}


@pytest.mark.parametrize("path, field", [(path, field) for path, fields in WRONG.items() for field in fields])
def test_a_field_out_of_range_is_named_with_its_limit(server, path, field):
    values, limit = WRONG[path][field]
    for value in values:
        response = server.post(path, {**ASK[path], field: value})
        message = assert_error(response, 400)
        param = response.json()["error"]["param"]
        assert param is not None and param.split(".")[0] == field, (value, response.text)
        assert field in message, (value, message)
        if type(value) in (int, float) and value != 1.5:  # what is of another kind has no limit
            assert any(number in message.partition(":")[2] for number in limit.split("|")), (value, message)


def test_all_bad_keys_of_a_bias_are_listed(server):
    bias = {"x": 1, "-3": 2, "5": 1000, "6": 1}
    message = assert_error(server.post(COMPLETIONS, {**ASK[COMPLETIONS], "logit_bias": bias}), 400, param="logit_bias")
    assert all(key in message for key in ("'x'", "'-3'", "'5'")) and "'6'" not in message
    far = {"100000": 1, "70000": 1}
    message = assert_error(server.post(COMPLETIONS, {**ASK[COMPLETIONS], "logit_bias": far}), 400, param="logit_bias")
    assert "100000" in message and "70000" in message


def test_the_first_bad_token_is_named(server):
    message = assert_error(server.post(COMPLETIONS, {**ASK[COMPLETIONS], "prompt": [3, 777, 888]}), 400)
    assert "777" in message


def test_best_of_is_at_least_n_and_not_for_streams(server):
    body = {**ASK[COMPLETIONS], "n": 3, "best_of": 2}
    assert_error(server.post(COMPLETIONS, body), 400, param="best_of")
    body = {**ASK[COMPLETIONS], "best_of": 2, "stream": True}
    assert_error(server.post(COMPLETIONS, body), 400, param="best_of")


def test_pictures_in_messages_are_refused_by_name(server):
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    message = assert_error(server.post(CHAT, {**ASK[CHAT], "messages": [{"role": "user", "content": parts}]}), 400)
    assert "image_url" in message


@pytest.mark.parametrize("path, field", [(COMPLETIONS, "max_tokens"), (CHAT, "max_completion_tokens")])
def test_more_than_the_budget(server, path, field):
    message = assert_error(server.post(path, {**ASK[path], "model": "small", "n": 128, field: 1000}), 400)
    assert "128" in message and "1000" in message and "65536" in message.replace(",", "")
    body = {**ASK[COMPLETIONS], "prompt": ["a"] * 2000, "max_tokens": 100}
    message = assert_error(server.post(COMPLETIONS, body), 400)
    assert "2000" in message and "65536" in message.replace(",", "")


# --- names and keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../tiny",
        "/etc/passwd",
        "..",
        ".",
        "tiny/",
        "tiny\0",
        "%2e%2e/tiny",
        "Tiny",
        "",
        " tiny",
        "tiny\n",
        "a" * 5000,
    ],
)
def test_names_are_looked_up_among_those_served_and_nowhere_else(server, name):
    for path, body in ASK.items():
        assert_error(server.post(path, {**body, "model": name}), 404, code="model_not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2ftiny",
        "/v1/models/%2e%2e",
        "/v1/models/%2fetc%2fpasswd",
        "/v1/models/tiny%00",
        "/v1/models/%252e%252e",
        "/v1/models/" + "a" * 5000,
        "/v1/engines/..%2f..%2ftiny/completions",
    ],
)
def test_names_in_paths_too(server, path):
    response = server.post(path, ASK[COMPLETIONS]) if "engines" in path else server.get(path)
    assert_error(response, 404)
    assert "root:" not in response.text


def test_unknown_paths_and_methods(server):
    assert_error(server.get("/v1/nothing"), 404)
    assert_error(server.get(COMPLETIONS), 405)
    assert_error(server.http.delete("/v1/models/tiny"), 405)


def test_a_page_of_another_origin_cannot_post(server):
    response = server.post(COMPLETIONS, ASK[COMPLETIONS], headers={"origin": "https://evil.example"})
    assert_error(response, 403)
    assert "access-control-allow-origin" not in response.headers
    response = server.post(COMPLETIONS, ASK[COMPLETIONS], headers={"host": "evil.example"})
    assert_error(response, 403)


@pytest.mark.parametrize("key", [None, "-", "sk-wrong", KEY + "x", KEY[:-1], KEY.upper(), "ключ"])
def test_every_path_but_health_asks_for_the_key(locked, key):
    import httpx2

    paths = [*ASK, "/tokenize", "/detokenize", "/v1/engines/tiny/completions"]
    paths.append("/v1/engines/tiny/completions/tokenize")
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    with httpx2.Client(base_url=locked.url, headers=headers, trust_env=False) as anyone:
        for path in paths:
            assert_error(anyone.post(path, json={}), 401, code="invalid_api_key")
        for path in (
            "/v1/models",
            "/v1/models/tiny",
            "/metrics",
            "/tokenizer_info",
            "/openapi.json",
            "/nothing",
        ):
            assert_error(anyone.get(path), 401, code="invalid_api_key")
        assert anyone.get("/health").status_code == 200
    assert locked.get("/v1/models").status_code == 200


def test_text_is_sent_as_text(server):
    """`<script>` in a name or a prompt comes back in JSON, never as a page."""
    response = server.post(COMPLETIONS, {**ASK[COMPLETIONS], "model": "<script>alert(1)</script>"})
    assert_error(response, 404)
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers.get("x-content-type-options") == "nosniff"


def test_the_request_id_comes_back(server):
    ids = {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert server.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.get("/health", headers={"x-request-id": "no\tgood"}).headers["x-request-id"] != "no\tgood"
