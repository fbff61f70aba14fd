"""The whole application without a socket, and without a model: what it refuses, and what it says of itself."""

from __future__ import annotations

import json

import pytest

from heedful.serve.app import create_app
from heedful.serve.errors import DESCRIPTIONS
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.serve.server import greeting
from support.asgi import request

POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]


def make_app(*models: str, **options):
    chosen = Options(**options)
    return create_app(ModelManager(models or ("shakespeare", "tiny"), chosen, Metrics()), chosen)


@pytest.fixture(scope="module")
def app():
    return make_app()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"[]", "JSON object"),
        (b'"x"', "JSON object"),
        (b"null", "JSON object"),
        (b"5", "JSON object"),
        (b"true", "JSON object"),
        (b'{"prompt": ', "not valid JSON"),
        (b"{'prompt': 'x'}", "not valid JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"n": NaN}', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"seed": 1' + b"0" * 1_000_000 + b"}", "a number in the body has more than 4,300 digits"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "a number in the body has more than 4,300 digits"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_wrong_body_is_refused_in_the_shape(app, path, body, words):
    reply = request(app, "POST", path, body)
    assert reply.status == 400 and words in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error" and len(reply.error["message"]) < 500


@pytest.mark.parametrize("path", POSTS)
def test_a_body_of_100_mb_is_refused(app, path):
    assert request(app, "POST", path, (b"x" * 2**20 for _ in range(100))).error["code"] == "request_too_large"


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/v1",
        "/v1/models/",
        "/v1/completions/",
        "/redoc",
        "/V1/models",
        "/assets/../app.py",
    ],
)
def test_unknown_paths(app, path):
    reply = request(app, path=path)
    assert reply.status == 404 and reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "NONSENSE"])
def test_wrong_methods_name_the_right_ones(app, method):
    reply = request(app, method, "/v1/completions", headers={"content-type": "application/json"})
    assert reply.status == 405 and reply.error["code"] == "method_not_allowed" and reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "name",
    [
        "nonesuch",
        "../zoo/tiny",
        "/etc/passwd",
        "tiny/../shakespeare",
        "%2e%2e",
        "a\0b",
        "\ud800",
        "",
        "x" * 5000,
    ],
)
def test_models_are_looked_up_by_their_names_alone(app, name):
    body = json.dumps({"model": name, "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]})
    for path in POSTS[:3]:
        reply = request(app, "POST", path, body.encode())
        assert reply.status in (400, 404) and reply.error["param"] == "model"
        assert reply.status == 400 or reply.error["code"] == "model_not_found"


def test_health_and_metrics(app):
    assert request(app, path="/health").json == {"status": "ok"}
    request(app, path="/nowhere/at/all")
    text = request(app, path="/metrics").body.decode()
    assert 'heedful_requests_total{path="/health",status="200"}' in text
    assert 'path="other",status="404"' in text and "at/all" not in text  # clients make up no labels


def test_the_key_guards_all_but_health():
    app = make_app(api_keys=("sesame",))
    for path in [*app.openapi()["paths"], "/openapi.json", "/redoc", "/nowhere"]:
        assert request(app, path=path).status == (200 if path == "/health" else 401), path
    assert request(app, path="/metrics", headers={"authorization": "Bearer sesame"}).status == 200


def test_the_openapi_schema_tells_of_every_error_and_of_no_422():
    schema = request(make_app(), path="/openapi.json").json
    assert "422" not in json.dumps(schema["paths"]) and "HTTPValidationError" not in schema["components"]["schemas"]
    for path, methods in schema["paths"].items():
        form = "AnthropicError" if path.startswith("/v1/messages") else "ErrorResponse"
        for operation in methods.values():
            for status in DESCRIPTIONS:
                content = operation["responses"][str(status)]["content"]["application/json"]
                assert content["schema"] == {"$ref": f"#/components/schemas/{form}"}, path
            assert all(
                kind.keys() & {"schema", "itemSchema"} for kind in operation["responses"]["200"]["content"].values()
            )
    for path in POSTS[:2]:
        assert "text/event-stream" in schema["paths"][path]["post"]["responses"]["200"]["content"]
    assert schema["components"]["schemas"]["ErrorDetail"]["required"] == ["message", "type", "param", "code"]
    assert "securitySchemes" not in schema["components"]
    locked = make_app(api_keys=("sesame",)).openapi()
    assert locked["security"] and locked["paths"]["/health"]["get"]["security"] == []


def test_the_line_at_the_start_says_what_where_who_and_how():
    options = Options()
    line = greeting(ModelManager(("shakespeare", "tiny"), options, Metrics()), options, ("127.0.0.1", 8123))
    line, show = line.splitlines()
    assert "shakespeare, tiny" in line and "http://127.0.0.1:8123" in line
    assert show == f"Open in a browser: http://127.0.0.1:8123/?token={options.token}"
    assert len(options.token) >= 40 and options.token != Options().token and options.token not in repr(options)
    assert 'curl http://127.0.0.1:8123/v1/completions -d \'{"model": "shakespeare"' in line
    options = Options(host="::1", api_keys=("sesame",), key_source="HEEDFUL_API_KEY")
    line = greeting(ModelManager(("bert-books",), options, Metrics()), options, ("::1", 80))
    assert "http://[::1]:80/v1/embeddings" in line and "Bearer $HEEDFUL_API_KEY" in line and "sesame" not in line
