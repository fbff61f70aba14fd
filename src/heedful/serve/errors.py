"""Error responses and exception handlers. A body is `{"error": {"message", "type", "param", "code"}}`, as OpenAI's are;
on the paths of Anthropic's API it is `{"type": "error", "error": {"type", "message"}}`, as theirs.

Routes raise ApiError. The code they call raises exceptions of its own, which `client_errors` converts wherever a
client's input may be the cause. Anything else that escapes from a route is a bug: 500, with the traceback in the log
and not in the response.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from heedful.generate.sampling import InvalidLogits
from heedful.serve.response_schema import ErrorResponse
from heedful.text.limits import TextTooLong

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a request whose client disconnected before the response
HALF_A_PAIR = "has half of a surrogate pair, which is no character: send whole ones"
MAX_ECHOED = 200  # characters of what a client sent that are repeated in a message

# OpenAI's error types; its Python client chooses the exception by the status alone.
TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
ANTHROPIC_PATHS = "/v1/messages"  # what they begin with
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    503: "unavailable",
}
# The description of each status in the OpenAPI schema.
DESCRIPTIONS = {
    400: "The request is wrong: `param` names the field, the message says what it may be",
    401: "The API key is missing or wrong",
    403: "The Host or Origin is not allowed here",
    404: "There is no such model or path",
    405: "This path has other methods",
    409: "Something that excludes it is under way",
    413: "The body is larger than this server takes",
    415: "The body is not JSON",
    429: "Too many requests are waiting: try again after `retry-after` seconds",
    500: "The server failed, and logged why under the request's id",
    503: "The server is stopping, or the model cannot be had now",
}


class Overloaded(Exception):
    """The queue is full, or no memory is left for another model: 429."""


class ShuttingDown(Exception):
    """The server, or this model, is being stopped: 503."""


class ApiError(Exception):
    """An error response; its type follows from the status, and its code where none is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or CODES.get(status)
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", "1")

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON object, in the form of the path's API."""
        if path.startswith(ANTHROPIC_PATHS):
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self, path: str = "") -> bytes:
        """The body as JSON, in ASCII: what is repeated of a client's input may have half a surrogate pair."""
        return json.dumps(self.body(path)).encode("ascii")

    def response(self, path: str) -> Response:
        """The whole response."""
        return Response(self.encoded(path), self.status, self.headers, "application/json")


def internal_error(request_id: str | None = None) -> ApiError:
    """A bug, of which the client learns only the id under which it is logged."""
    which = f" (request {request_id})" if request_id else ""
    return ApiError(500, f"internal error{which}: the server's log says more", code="internal_error")


def from_exception(error: Exception) -> ApiError:
    """The error response for an exception that a client's request raised."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            return ApiError(429, str(error) or "too many requests are waiting: try again in a moment")
        case ShuttingDown():
            return ApiError(503, str(error) or "the server is stopping")
        case InvalidLogits():
            return ApiError(
                500,
                "the model computed no possible next token (its logits are not finite)",
                code="model_failed",
            )
        case TextTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case ValueError():
            return ApiError(400, str(error))
        case MemoryError():
            return ApiError(500, "out of memory: ask for less, or try again later", code="out_of_memory")
    if type(error) is LookupError:  # not KeyError and IndexError, which are bugs
        return ApiError(404, str(error), param="model", code="model_not_found")
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of an accelerator
        return ApiError(500, "out of memory: ask for less, or try again later", code="out_of_memory")
    return internal_error()


@contextmanager
def client_errors(param: str | None = None) -> Iterator[None]:
    """Convert exceptions that a client can do something about to ApiErrors; `param` is the field they are about."""
    try:
        yield
    except (ValueError, LookupError, Overloaded, ShuttingDown, MemoryError) as error:
        if isinstance(error, KeyError | IndexError):
            raise  # a bug
        found = from_exception(error)
        if found.status == 400:
            found.param = found.param or param
        raise found from None


def execution_error(error: Exception, request_id: str | None) -> ApiError:
    """The error response for a request that failed in the worker, which has logged why."""
    found = from_exception(error)
    return internal_error(request_id) if found.code == "internal_error" else found


def request_id(scope: MutableMapping[str, Any]) -> str | None:
    """The id that the middleware gave a request, as in the header x-request-id."""
    return scope.get("state", {}).get("request_id")


# --- exception handlers ---------------------------------------------------------------------------------------------

SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 3, 50, 50


def abbreviate(value: object) -> str:
    """A client's value for a message: it may be megabytes, nested deeply, or a number that Python does not print."""
    if isinstance(value, str):
        text = json.dumps(value[: MAX_ECHOED + 1])
    elif isinstance(value, bool | None):
        text = json.dumps(value)
    else:
        try:
            text = SHORT.repr(value)
        except ValueError:
            text = f"a very large {type(value).__name__}"
    return text if len(text) <= MAX_ECHOED else text[:MAX_ECHOED] + "…"


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's validation errors, with the name of its field."""
    first = errors[0]
    place = [str(part) for part in first["loc"][1:]]
    where = first["loc"][0] if first["loc"] else "body"
    kind, value, message = first["type"], first.get("input"), str(first["msg"])
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']} at character {place[0]}")
    if not place and where == "body":
        if kind == "missing":
            return ApiError(400, "the body is empty or null: send a JSON object")
        if kind != "value_error":
            return ApiError(400, f"the body must be a JSON object, not {abbreviate(value)}")
    if kind == "value_error":  # a FieldError, which says where in the field, or which field
        problem = first["ctx"]["error"]
        inner = [part for part in getattr(problem, "param", "").split(".") if part]
        place = place[:-1] + inner if place and inner[:1] == place[-1:] else place + inner
        message = getattr(problem, "problem", str(problem))
    name = ".".join(place)
    if kind == "missing":
        message = "is missing"
    elif kind == "string_unicode":
        message = HALF_A_PAIR
    elif kind != "value_error":
        message = f"is {abbreviate(value)}: {message[:1].lower()}{message[1:]}"
    return ApiError(400, f"{name} {message}", param=name)


async def api_error_handler(request: Request, error: Exception) -> Response:
    """The response for an ApiError."""
    assert isinstance(error, ApiError)
    return error.response(request.scope["path"])


async def validation_error_handler(request: Request, error: Exception) -> Response:
    """The response for a body that does not match its schema: 400, not FastAPI's 422."""
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response(request.scope["path"])


async def http_error_handler(request: Request, error: Exception) -> Response:
    """The response for what Starlette refuses: unknown paths, wrong methods, bodies that are not JSON."""
    assert isinstance(error, HTTPException)
    path, status = request.scope["path"][:MAX_ECHOED], error.status_code
    message = str(error.detail)
    if status == 404:
        message = f"there is no {path} here"
    elif status == 405:
        message = f"{path} does not answer {request.method}"
    elif isinstance(error.__cause__, RecursionError):
        message = "the body is not valid JSON: it is nested too deeply"
    elif isinstance(error.__cause__, ValueError):  # int's: more digits than it converts
        message = f"a number in the body has more than {sys.get_int_max_str_digits():,} digits, which no field takes"
    return ApiError(status, message, headers=error.headers).response(path)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route in the OpenAPI schema for these error statuses."""
    return {status: {"model": ErrorResponse, "description": DESCRIPTIONS[status]} for status in statuses}
