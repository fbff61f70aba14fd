"""What every request passes: who may ask, from where, and how much; its id; its line in the log and the metrics.

Pure ASGI, since middlewares that wrap responses hide a client's going away. In this order: the Host (a page whose name
was made to point to this machine must not reach a server without a key), the Origin (nor may any other page), the API
key, the kind of the body, its size. Bodies are read here, as far as the limit, and handed on whole.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heedful.serve.errors import ApiError, Overloaded, ShuttingDown, abbreviate, internal_error
from heedful.serve.metrics import Metrics
from heedful.serve.options import Options

log = logging.getLogger("heedful.serve")
access = logging.getLogger("heedful.serve.access")

OPEN_PATHS = frozenset({"/health", "/", "/icon.svg"})  # ask for no key
ASSETS = "/assets/"  # nor does what the page is made of; all that it asks of models does
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
SANE_HEADERS = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")
EXPOSED = b"x-request-id, openai-processing-ms, retry-after"

Headers = list[tuple[bytes, bytes]]


class Middleware:
    """Middleware around the application."""

    def __init__(self, app: ASGIApp, options: Options, metrics: Metrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
        self.keys = [key.encode("utf-8") for key in options.api_keys]
        # Without a key, whoever reaches us by a name that is not ours was led here by a page.
        self.hosts = None if self.keys else {"localhost", host_name(options.host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        visit = Visit(scope, send)
        scope.setdefault("state", {})["request_id"] = visit.id
        try:
            await self._answer(scope, receive, visit)
        except ApiError as error:
            await visit.refuse(error)
        except Overloaded as error:
            await visit.refuse(ApiError(429, str(error) or "too many requests are waiting"))
        except ShuttingDown as error:
            await visit.refuse(ApiError(503, str(error) or "the server is stopping"))
        except Exception:
            log.exception("request %s failed", visit.id)
            await visit.refuse(internal_error(visit.id))
        finally:
            self._note(scope, visit)

    async def _answer(self, scope: Scope, receive: Receive, visit: Visit) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])  # of one given twice, the last
        self._check_host(scope["headers"])
        origin = self._check_origin(scope, headers)
        if origin is not None:
            visit.extra += self._cors(origin)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                return await visit.preflight(headers)
        self._check_key(scope["path"], headers)
        if scope["method"] in WITH_BODY:
            self._check_size(headers)
            body = await self._read(receive)
            if body is None:
                return
            if body:
                self._check_type(scope, headers, foreign=origin is not None)
                check_json(body)
            receive = replay(body, receive)
        await self.app(scope, receive, visit.send)

    # --- who and from where -----------------------------------------------------------------------------------------

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
        """The page's origin, if a page of another origin asks and may."""
        given = headers.get(b"origin")
        if given is None:
            if scope["method"] in WITH_BODY and headers.get(b"sec-fetch-site") == b"cross-site":
                _refuse_origin("another site")
            return None
        origin = given.decode("latin-1")
        own = headers.get(b"host", b"").decode("latin-1")
        if own and origin.lower() in (f"http://{own}".lower(), f"https://{own}".lower()):
            return None
        if "*" not in self.options.allow_origins and origin not in self.options.allow_origins:
            _refuse_origin(abbreviate(origin))
        return origin

    def _cors(self, origin: str) -> Headers:
        every = "*" in self.options.allow_origins
        headers = [(b"access-control-expose-headers", EXPOSED)]
        headers.append((b"access-control-allow-origin", b"*" if every else origin.encode("latin-1")))
        return headers if every else [*headers, (b"vary", b"origin")]

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self.keys or path in OPEN_PATHS or path.startswith(ASSETS):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not given.strip():
            message = "this server asks for an API key: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, headers={"www-authenticate": 'Bearer realm="heedful"'})
        # All of them are compared, so that the time says nothing about which.
        if not any([hmac.compare_digest(given.strip(), key) for key in self.keys]):
            challenge = 'Bearer realm="heedful", error="invalid_token"'
            raise ApiError(401, "the API key is not right", headers={"www-authenticate": challenge})

    # --- the body ---------------------------------------------------------------------------------------------------

    def _check_type(self, scope: Scope, headers: dict[bytes, bytes], *, foreign: bool) -> None:
        """JSON only: any page may post the other kinds without asking first. curl's own default is let through where
        no page can have sent it."""
        given = headers.get(b"content-type", b"").decode("latin-1")
        kind = given.partition(";")[0].strip().lower()
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "compressed bodies are not read here: send it without content-encoding")
        if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
            return
        by_page = foreign or b"origin" in headers or headers.get(b"sec-fetch-site") == b"cross-site"
        if by_page or kind not in ("", "application/x-www-form-urlencoded"):
            raise ApiError(415, f"the Content-Type is {abbreviate(given)}: it must be application/json")
        kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]

    def _check_size(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self.options.max_body):
            self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or nothing if the client goes away meanwhile. What a refused client still sends is thrown
        away by the protocol."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self.options.max_body:
                self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> NoReturn:
        raise ApiError(413, f"the body is larger than {self.options.max_body:,} bytes, the most this server takes")

    # --- afterwards -------------------------------------------------------------------------------------------------

    def _note(self, scope: Scope, visit: Visit) -> None:
        seconds = time.perf_counter() - visit.began
        # 499: the client went away before anything was answered
        status, path = visit.status or 499, getattr(scope.get("route"), "path", "other")
        self.metrics.answered(path, status, seconds)
        if self.options.verbose:
            client = (scope.get("client") or ("-",))[0]
            asked = f"{scope['method']} {ascii(scope['path'])[1:-1]}"  # no line breaks or colours of others in our log
            access.info("%s %s %d %.0f ms %s", client, asked, status, 1000 * seconds, visit.id)


class Visit:
    """One request while it is answered: its id, and the headers that every response gets."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = time.perf_counter()
        self._send = send
        self.status: int | None = None
        self.extra: Headers = []
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self.id = given.decode("ascii") if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            took = str(round(1000 * (time.perf_counter() - self.began))).encode("ascii")
            own = [(b"x-request-id", self.id.encode("ascii")), (b"openai-processing-ms", took)]
            own.append((b"x-content-type-options", b"nosniff"))  # what a model writes is no page
            message["headers"] = [*message.get("headers", ()), *own, *self.extra]
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error; nothing can be said any more if an answer has begun."""
        if self.status is None:
            body = error.encoded()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode("ascii")),
            ]
            headers += [(name.lower().encode("latin-1"), v.encode("latin-1")) for name, v in error.headers.items()]
            await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})

    async def preflight(self, headers: dict[bytes, bytes]) -> None:
        """The question that a browser asks before a page's request."""
        allowed = [
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-max-age", b"600"),
        ]
        wanted = headers.get(b"access-control-request-headers", b"")
        if SANE_HEADERS.fullmatch(wanted):
            allowed.append((b"access-control-allow-headers", wanted))
        if headers.get(b"access-control-request-private-network") == b"true":
            allowed.append((b"access-control-allow-private-network", b"true"))
        await self.send({"type": "http.response.start", "status": 204, "headers": allowed})
        await self.send({"type": "http.response.body", "body": b""})


def _refuse_origin(origin: str) -> NoReturn:
    raise ApiError(
        403,
        f"a page of {origin} may not use this server: start it with --allow-origin to let it",
        code="origin_not_allowed",
    )


def check_json(body: bytes) -> None:
    """What json.loads would let pass: bytes that are not UTF-8, NaN and Infinity."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: byte {problem.start} is {body[problem.start]:#04x}") from None
    if b"\0" in body:
        raise ApiError(400, "the body is not valid JSON: it has a NUL byte (is it UTF-16?)")
    if b"NaN" in body or b"Infinity" in body:  # in a text, perhaps
        try:
            json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            pass  # whoever parses it next says so


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: it has {name}, which is not a number of JSON's")


def replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once and then goes on as before, so that a client's going away is heard of."""
    pending: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        for message in pending:
            return message
        return await receive()

    return again


def host_name(host: str) -> str:
    """The name in a Host header, without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host if host.count(":") > 1 else host.partition(":")[0]).lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
