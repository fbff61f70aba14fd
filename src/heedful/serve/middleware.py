"""The middleware that every request passes: access control, limits, request ids, the access log and metrics.

Checked in this order: the Host header (against DNS rebinding, where a server has no API key), the Origin (CORS), the
API key, the size of the body, its content type, its JSON. The body is read here, up to the limit, and passed on whole.
Pure ASGI, because middlewares that wrap the response hide the client's disconnect.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heedful.serve.errors import (
    ANTHROPIC_PATHS,
    CLIENT_CLOSED_REQUEST,
    ApiError,
    Overloaded,
    ShuttingDown,
    abbreviate,
    from_exception,
    internal_error,
)
from heedful.serve.metrics import Metrics
from heedful.serve.options import Options
from heedful.text.parse import parse_json

log = logging.getLogger("heedful.serve")
access = logging.getLogger("heedful.serve.access")

OPEN_PATHS = frozenset({"/health", "/", "/icon.svg", "/docs"})  # need no API key
OPEN_FOLDERS = ("/assets/", "/docs/")  # files of the playground and of the documentation need none either
MAX_BODIES = 32  # of the largest size, that may be arriving at once
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")
EXPOSED_HEADERS = b"x-request-id, request-id, openai-processing-ms, retry-after"

Headers = list[tuple[bytes, bytes]]


class RequestMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, options: Options, metrics: Metrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
        self.keys = [key.encode("utf-8") for key in options.api_keys]
        # Without a key, a request for another host name was made by a web page: DNS rebinding.
        self.hosts = None if self.keys else {"localhost", host_name(options.host)}
        self._n_arriving = 0  # bytes of the bodies that are being received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, pass it on, and record it; exceptions become error responses."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        exchange = Exchange(scope, send)
        scope.setdefault("state", {})["request_id"] = exchange.id
        try:
            await self._dispatch(scope, receive, exchange)
        except (ApiError, Overloaded, ShuttingDown) as error:
            await exchange.send_error(from_exception(error))
        except Exception:
            log.exception("request %s failed", exchange.id)
            await exchange.send_error(internal_error(exchange.id))
        finally:
            self._record(scope, exchange)

    async def _dispatch(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])  # of duplicates, the last
        self._check_host(scope["headers"])
        origin = self._check_origin(scope, headers)
        if origin is not None:
            exchange.extra_headers += self._cors_headers(origin)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                return await exchange.preflight(headers)
        scope["state"]["key"] = self._check_key(scope["path"], headers)
        if scope["method"] in WITH_BODY:
            self._check_size(headers)
            body = await self._read_body(receive)
            if body is None:
                return
            if body:
                self._check_type(scope, headers, cross_origin=origin is not None)
                check_json(body)
            receive = replay_body(body, receive)
        await self.app(scope, receive, exchange.send)

    # --- access control ---------------------------------------------------------------------------------------------

    def _check_host(self, headers: Headers) -> None:
        if self.hosts is None:
            return
        for name, value in headers:
            if name == b"host" and value:
                host = host_name(value.decode("latin-1"))
                if host not in self.hosts and not is_loopback(host):
                    raise ApiError(
                        403,
                        f"the Host is {abbreviate(host)}, and without an API key this server answers only as "
                        "localhost: use http://localhost or http://127.0.0.1, or start the server with a key",
                        code="host_not_allowed",
                    )

    def _check_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
        """The origin of an allowed cross-origin request, None for any other; ApiError if it is not allowed."""
        given = headers.get(b"origin")
        if given is None:
            if scope["method"] in WITH_BODY and headers.get(b"sec-fetch-site") == b"cross-site":
                _reject_origin("another site")
            return None
        origin = given.decode("latin-1")
        own = headers.get(b"host", b"").decode("latin-1")
        if own and origin.lower() in (f"http://{own}".lower(), f"https://{own}".lower()):
            return None
        if "*" not in self.options.allow_origins and origin not in self.options.allow_origins:
            _reject_origin(abbreviate(origin))
        return origin

    def _cors_headers(self, origin: str) -> Headers:
        every = "*" in self.options.allow_origins
        headers = [(b"access-control-expose-headers", EXPOSED_HEADERS)]
        headers.append((b"access-control-allow-origin", b"*" if every else origin.encode("latin-1")))
        return headers if every else [*headers, (b"vary", b"origin")]

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> int | None:
        """Which of the keys was given, None where none is asked for; Anthropic's clients send it as x-api-key."""
        if not self.keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if b"authorization" not in headers:
            scheme, given = b"bearer", headers.get(b"x-api-key", b"")
        if scheme.lower() != b"bearer" or not given.strip():
            message = "this server asks for an API key: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, headers={"www-authenticate": 'Bearer realm="heedful"'})
        # All are compared, in constant time: the time must not tell which was close.
        same = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        if not any(same):
            challenge = 'Bearer realm="heedful", error="invalid_token"'
            raise ApiError(401, "the API key is not right", headers={"www-authenticate": challenge})
        return same.index(True)

    # --- the body ---------------------------------------------------------------------------------------------------

    def _check_type(self, scope: Scope, headers: dict[bytes, bytes], *, cross_origin: bool) -> None:
        """Accept JSON only: browsers post other types across origins without a preflight. curl's default type is
        accepted where no web page can have sent it."""
        given = headers.get(b"content-type", b"").decode("latin-1")
        kind = given.partition(";")[0].strip().lower()
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "compressed bodies are not read here: send it without content-encoding")
        if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
            return
        by_page = cross_origin or b"origin" in headers or headers.get(b"sec-fetch-site") == b"cross-site"
        if by_page or kind not in ("", "application/x-www-form-urlencoded"):
            raise ApiError(415, f"the Content-Type is {abbreviate(given)}: it must be application/json")
        kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]

    def _check_size(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self.options.max_body):
            self._too_large()

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The whole body, None if the client disconnects before its end. The protocol discards what is left of a
        body that is too large."""
        parts, size = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                part = message.get("body", b"")
                size += len(part)
                self._n_arriving += len(part)
                if size > self.options.max_body:
                    self._too_large()
                if self._n_arriving > MAX_BODIES * self.options.max_body:
                    raise Overloaded("too many large requests arrive at once: try again later")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
        finally:
            self._n_arriving -= size

    def _too_large(self) -> NoReturn:
        raise ApiError(413, f"the body is larger than {self.options.max_body:,} bytes, the most this server takes")

    # --- records ----------------------------------------------------------------------------------------------------

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        status, path = exchange.status or CLIENT_CLOSED_REQUEST, getattr(scope.get("route"), "path", "other")
        self.metrics.request_finished(path, status, seconds)
        if self.options.verbose:
            client = (scope.get("client") or ("-",))[0]
            asked = f"{scope['method']} {ascii(scope['path'])[1:-1]}"  # escaped: no line breaks or control codes
            access.info("%s %s %d %.0f ms %s", client, asked, status, 1000 * seconds, exchange.id)


class Exchange:
    """One request and its response: the request id, and the headers that every response gets."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = time.perf_counter()
        self._send, self._path = send, scope["path"]
        self.status: int | None = None
        self.extra_headers: Headers = []
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self.id = given.decode("ascii") if REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"

    async def send(self, message: Message) -> None:
        """Send a message of the response, with the common headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            took = str(round(1000 * (time.perf_counter() - self.started))).encode("ascii")
            own = [(b"x-request-id", self.id.encode("ascii")), (b"openai-processing-ms", took)]
            if self._path.startswith(ANTHROPIC_PATHS):
                own.append((b"request-id", self.id.encode("ascii")))  # where their clients look for it
            own.append((b"x-content-type-options", b"nosniff"))  # a model's output is not HTML
            message["headers"] = [*message.get("headers", ()), *own, *self.extra_headers]
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error response, unless a response has started already."""
        if self.status is None:
            body = error.encoded(self._path)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode("ascii")),
            ]
            headers += [(name.lower().encode("latin-1"), v.encode("latin-1")) for name, v in error.headers.items()]
            await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})

    async def preflight(self, headers: dict[bytes, bytes]) -> None:
        """Answer a CORS preflight request."""
        allowed = [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-max-age", b"600"),
        ]
        wanted = headers.get(b"access-control-request-headers", b"")
        if HEADER_NAMES.fullmatch(wanted):
            allowed.append((b"access-control-allow-headers", wanted))
        if headers.get(b"access-control-request-private-network") == b"true":
            allowed.append((b"access-control-allow-private-network", b"true"))
        await self.send({"type": "http.response.start", "status": 204, "headers": allowed})
        await self.send({"type": "http.response.body", "body": b""})


def _reject_origin(origin: str) -> NoReturn:
    raise ApiError(
        403,
        f"a page of {origin} may not use this server: start it with --allow-origin to let it",
        code="origin_not_allowed",
    )


def check_json(body: bytes) -> None:
    """ApiError for what json.loads would accept: other encodings than UTF-8, NaN and Infinity."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: byte {problem.start} is {body[problem.start]:#04x}") from None
    if b"\0" in body:
        raise ApiError(400, "the body is not valid JSON: it has a NUL byte (is it UTF-16?)")
    if b"NaN" in body or b"Infinity" in body:  # perhaps within a string
        try:
            parse_json(body, parse_constant=_reject_constant)
        except (ValueError, RecursionError):
            pass  # the route's parser reports it


def _reject_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: it has {name}, which is not a number of JSON's")


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body once and then the messages that follow, such as the disconnect."""
    pending: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_again() -> Message:
        for message in pending:
            return message
        return await receive()

    return receive_again


def host_name(host: str) -> str:
    """The name in a Host header, without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host if host.count(":") > 1 else host.partition(":")[0]).lower()


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
