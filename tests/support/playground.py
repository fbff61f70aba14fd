"""The playground's API as its page sees it, and the library's own numbers to hold them against."""

from __future__ import annotations

import base64
import json
import math
from functools import cache
from typing import Any

import numpy as np
import torch

import heedful
from heedful.loaded import Loaded
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


def asked(client: Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a question that is right."""
    response = client.post(f"/api/{path}", body)
    assert response.status_code == 200, response.text
    return response.json()


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
