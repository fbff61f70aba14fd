"""Access control, limits and request ids: the middleware around a small application of its own."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from heedful.serve.errors import ApiError, Overloaded, ShuttingDown
from heedful.serve.metrics import Metrics
from heedful.serve.middleware import RequestMiddleware
from heedful.serve.options import Options
from support.asgi import request

KEY = {"authorization": "Bearer sesame"}


async def echo(scope, receive, send):
    """Says which content type and body reached it."""
    message = await receive()
    assert message["type"] == "http.request" and not message.get("more_body")
    kind = dict(scope["headers"]).get(b"content-type", b"").decode()
    body = json.dumps({"type": kind, "size": len(message["body"])}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


def raising(error):
    async def app(scope, receive, send):
        raise error

    return app


def wrapped(app=echo, **options) -> RequestMiddleware:
    return RequestMiddleware(app, Options(**options), Metrics())


# --- keys -----------------------------------------------------------------------------------------------------------


def test_without_a_key_everyone_on_this_machine_may_ask():
    assert request(wrapped(), path="/v1/models").status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/nowhere", "/health/x", "//"])
def test_every_path_asks_for_the_key(path):
    reply = request(wrapped(api_keys=("sesame",)), path=path)
    assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert request(wrapped(api_keys=("sesame",)), path=path, headers=KEY).status == 200


@pytest.mark.parametrize("path", ["/health", "/"])
def test_health_and_the_page_do_not(path):
    assert request(wrapped(api_keys=("sesame",)), path=path).status == 200


@pytest.mark.parametrize(
    "given",
    [
        "Bearer",
        "Bearer ",
        "Bearer sesam",
        "Bearer sesamee",
        "sesame",
        "Basic sesame",
        "Bearer séame",
        "Bearer a b",
    ],
)
def test_a_wrong_key_is_refused_and_not_repeated(given):
    reply = request(wrapped(api_keys=("sesame",)), path="/v1/models", headers={"authorization": given})
    assert reply.status == 401 and "sesam" not in reply.error["message"]


def test_several_keys_and_any_spelling_of_bearer():
    app = wrapped(api_keys=("one", "two"))
    for given in ("Bearer one", "bearer two", "BEARER one "):
        assert request(app, path="/v1/models", headers={"authorization": given}).status == 200


def test_anthropics_clients_send_the_key_in_a_header_of_their_own():
    app = wrapped(api_keys=("sesame",))
    assert request(app, path="/v1/messages", headers={"x-api-key": "sesame"}).status == 200
    for headers in ({"x-api-key": "sesam"}, {"x-api-key": ""}, {"x-api-key": "sesame", "authorization": "Bearer x"}):
        reply = request(app, path="/v1/messages", headers=headers)
        assert reply.status == 401 and reply.headers["request-id"] == reply.headers["x-request-id"]
        assert reply.json["type"] == "error" and reply.json["error"]["type"] == "authentication_error"


def test_the_key_is_asked_for_before_the_body_is_read():
    assert request(wrapped(api_keys=("sesame",)), "POST", "/v1/completions", b"{}").n_received == 0


# --- hosts and origins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "127.3.2.1"]
)
def test_this_machines_names_are_allowed(host):
    assert request(wrapped(), host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "[::2]", "10.0.0.1"],
)
def test_a_name_that_was_made_to_point_here_is_refused(host):
    reply = request(wrapped(), host=host)
    assert reply.status == 403 and reply.error["code"] == "host_not_allowed"


def test_with_a_key_any_name_will_do():
    assert request(wrapped(api_keys=("sesame",)), path="/v1/models", host="gpu.example", headers=KEY).status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:3000", "http://localhost", "file://"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_origins_are_refused(method, origin):
    headers = {"origin": origin, "access-control-request-method": "POST"}
    reply = request(wrapped(), method, "/v1/completions", b"{}", headers)
    assert reply.status == 403 and reply.error["code"] == "origin_not_allowed"
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_our_own_page_may_ask():
    for origin in ("http://localhost:8000", "https://localhost:8000"):
        assert request(wrapped(), "POST", "/v1/completions", b"{}", {"origin": origin}).status == 200


def test_another_sites_post_without_an_origin_is_refused():
    assert request(wrapped(), "POST", "/v1/completions", b"{}", {"sec-fetch-site": "cross-site"}).status == 403


def test_an_allowed_origin_gets_its_headers_and_its_preflight():
    app = wrapped(allow_origins=("https://example.org",), api_keys=("sesame",))
    headers = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    reply = request(app, "OPTIONS", "/v1/completions", headers=headers)  # a browser sends it without the key
    assert reply.status == 204 and not reply.body
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert "POST" in reply.headers["access-control-allow-methods"] and reply.headers["vary"] == "origin"
    reply = request(app, "POST", "/v1/completions", b"{}", {"origin": "https://example.org", **KEY})
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://example.org"
    reply = request(app, "POST", "/v1/completions", b"{}", {"origin": "https://example.org"})
    assert reply.status == 401 and "access-control-allow-origin" in reply.headers  # the page can read why
    assert request(app, headers={"origin": "https://example.org.evil"}, path="/v1/models").status == 403


def test_all_origins_may_be_allowed():
    reply = request(wrapped(allow_origins=("*",)), headers={"origin": "https://any.example"})
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "*"


# --- bodies ---------------------------------------------------------------------------------------------------------


def test_a_body_of_the_limit_passes_and_a_byte_more_does_not():
    app = wrapped(max_body=100)
    assert request(app, "POST", "/", [b'"' + b" " * 49, b" " * 49 + b'"']).json["size"] == 100
    reply = request(app, "POST", "/", [b'"' + b" " * 49, b" " * 50 + b'"'])
    assert reply.status == 413 and "100 bytes" in reply.error["message"]


def test_a_large_body_is_refused_before_it_is_read():
    reply = request(wrapped(), "POST", "/", b"x", {"content-length": str(100 * 2**20)})
    assert reply.status == 413 and reply.n_received == 0
    endless = (b"x" * 2**20 for _ in range(100))
    reply = request(wrapped(), "POST", "/", endless)  # chunked: nobody says how long it is
    assert reply.status == 413 and reply.n_received == 9
    assert request(wrapped(), "POST", "/", b"x", {"content-length": "9" * 5000}).status == 413


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16-le"), "NUL"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b'{"anything": [{"else": -Infinity}]}', "-Infinity"),
    ],
)
def test_what_is_nearly_json_is_refused(body, words):
    reply = request(wrapped(), "POST", "/", body)
    assert reply.status == 400 and words in reply.error["message"]


def test_a_text_about_nan_is_a_text():
    assert request(wrapped(), "POST", "/", b'{"prompt": "NaN, Infinity and -Infinity"}').status == 200


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
def test_json_is_json(kind):
    assert request(wrapped(), "POST", "/", b"{}", content_type=kind).status == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/octet-stream", "é", "x" * 9999]
)
def test_other_kinds_are_not(kind):
    reply = request(wrapped(), "POST", "/", b"{}", content_type=kind)
    assert reply.status == 415 and "application/json" in reply.error["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", None])
def test_curls_default_is_taken_for_json_unless_a_page_sends_it(kind):
    assert request(wrapped(), "POST", "/", b"{}", content_type=kind).json["type"] == "application/json"
    own = {"origin": "http://localhost:8000"}
    assert request(wrapped(), "POST", "/", b"{}", own, content_type=kind).status == 415
    app = wrapped(allow_origins=("*",))
    assert request(app, "POST", "/", b"{}", {"origin": "https://x.example"}, content_type=kind).status == 415


def test_compressed_bodies_are_refused():
    assert request(wrapped(), "POST", "/", b"\x1f\x8b", {"content-encoding": "gzip"}).status == 415


def test_a_client_that_leaves_before_its_body_is_whole_reaches_nobody():
    async def leave():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    metrics = Metrics()
    middleware = RequestMiddleware(raising(AssertionError("called")), Options(), metrics)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(middleware(scope, leave, send))
    assert 'status="499"' in metrics.render().decode()


# --- every response -------------------------------------------------------------------------------------------------


def test_every_response_has_an_id_and_its_time():
    for reply in (request(wrapped()), request(wrapped(), host="evil.example")):
        assert reply.headers["x-request-id"].startswith("req_")
        assert reply.headers["openai-processing-ms"].isdigit()
    assert request(wrapped()).headers["x-request-id"] != request(wrapped()).headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-123_x.y", True), ("a b", False), ("", False), ("x" * 200, False), ("é", False)]
)
def test_a_sane_id_of_the_clients_is_kept(given, kept):
    assert (request(wrapped(), headers={"x-request-id": given}).headers["x-request-id"] == given) == kept


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full"), 429),
        (ShuttingDown(), 503),
        (ApiError(404, "no"), 404),
        (ValueError("secret"), 500),
        (KeyError("x"), 500),
    ],
)
def test_what_escapes_from_a_route_is_answered_in_the_shape(error, status, caplog):
    reply = request(wrapped(raising(error)), headers={"x-request-id": "mine"})
    assert reply.status == status and reply.error["message"]
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    if status == 500:
        assert reply.error["type"] == "server_error" and "mine" in reply.error["message"]
        assert "secret" not in reply.error["message"]
        assert "mine" in caplog.text and "Traceback" in caplog.text


def test_a_line_per_request_says_neither_key_nor_query_nor_control_characters(caplog):
    caplog.set_level(logging.INFO, "heedful.serve.access")
    request(wrapped(api_keys=("sesame",), verbose=True), path="/v1/\n\x1b[31mx", headers=KEY)
    (record,) = caplog.records
    line = record.getMessage()
    assert "GET /v1/\\n\\x1b[31mx 200" in line and "sesame" not in line
    caplog.clear()
    request(wrapped())
    assert not caplog.records


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_needs_a_key(host):
    with pytest.raises(ValueError, match="HEEDFUL_API_KEY"):
        Options(host=host).check_public()
    Options(host=host, api_keys=("sesame",)).check_public()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_a_private_one_does_not(host):
    Options(host=host).check_public()


@pytest.mark.parametrize(
    "wrong",
    [{"port": 70_000}, {"max_rows": 0}, {"memory": 0.0}, {"memory": float("nan")}, {"drain": -1.0}, {"api_keys": ("",)},
     {"api_keys": ("a b",)}, {"api_keys": ("é",)}, {"allow_origins": ("example.org",)}, {"allow_origins": ("https://x/y",)}],
)  # fmt: skip
def test_options_are_checked(wrong):
    with pytest.raises(ValueError):
        Options(**wrong)
