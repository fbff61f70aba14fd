"""The playground's API as its page sees it, and the library's own numbers to hold them against."""

from __future__ import annotations

import base64
import json
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

import heedful
from heedful.loaded import Loaded
from heedful.serve.playground import API_MODULES
from heedful.serve.playground.images import PixelEvent
from heedful.serve.playground.lessons import CellEvent, LessonEnd
from support.serving import Client

TEXTS = {
    "tiny": "To be, or not",
    "shakespeare": "First Citizen: speak",
    "bert-books": "He was a man of great learning.",
    "reversal": "3 1 4 15 9 2 6",
    "translator": "Ein Mann fährt mit dem Fahrrad auf der Straße.",
}


@cache
def exact(name: str) -> Loaded:
    """A model as the library has it, in float32."""
    return heedful.load(name, dtype=torch.float32)


DTYPES = {"float32": "<f4", "uint8": "u1"}


def array(found: dict[str, Any], after: bytes = b"") -> torch.Tensor:
    """An array of a reply: in JSON in base64, else in the bytes `after` it."""
    raw = base64.b64decode(found["data"]) if "data" in found else after[found["at"] :]
    kind, count = np.dtype(DTYPES[found["dtype"]]), math.prod(found["shape"])
    assert len(raw) == count * kind.itemsize or "at" in found
    return torch.from_numpy(np.frombuffer(raw, kind, count).copy()).view(found["shape"])


def same(found: Any, expected: Any, *, atol: float = 2e-5) -> None:
    """Equal but for the order of sums: the server packs weights."""
    found = array(found) if isinstance(found, dict) else torch.tensor(found)
    torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=atol, rtol=1e-4)


STREAMS = {  # the events of routes that have no response model
    "/api/image/complete": PixelEvent,
    "/api/lessons/{name}/run": CellEvent | LessonEnd,
}


@cache
def response_models() -> dict[tuple[str, str], Any]:
    """The response model of every route under /api, by method and path."""
    routes: list[Any] = [route for module in API_MODULES for route in module.router.routes]
    models = [route.response_model or STREAMS[route.path] for route in routes]
    return {
        (method, route.path): TypeAdapter(model)
        for route, model in zip(routes, models, strict=True)
        for method in route.methods
    }


def validated(method: str, path: str, content: bytes | str) -> Any:
    """A response's JSON, which must be as the route's response model says, to the letter."""
    response_models()[method, path].validate_json(content, strict=True)
    return json.loads(content)


def asked(client: Client, path: str, **body: Any) -> dict[str, Any]:
    """The JSON of a successful request, checked against the route's response model."""
    response = client.post(f"/api/{path}", body)
    assert response.status_code == 200, response.text
    return validated("POST", f"/api/{path}", response.content)


def packed(client: Client, path: str, **body: Any) -> tuple[dict[str, Any], bytes]:
    """The same with the arrays after the JSON, for `array`."""
    accept = "application/vnd.heedful.arrays, application/json"
    response = client.post(f"/api/{path}", body, headers={"accept": accept})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/vnd.heedful.arrays"
    end = 4 + int.from_bytes(response.content[:4], "little")
    return json.loads(response.content[4:end]), response.content[end:]


def pieces(tokens: list[dict[str, Any]]) -> list[str]:
    assert all(set(token) == {"id", "text", "raw", "special"} for token in tokens)
    return [token["text"] for token in tokens]
