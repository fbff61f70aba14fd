"""The playground's API as its page sees it, and the library's own numbers to hold them against."""

from __future__ import annotations

import base64
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
    "translator": "A man is riding a bicycle.",
}


@cache
def exact(name: str) -> Loaded:
    """A model as the library has it, in float32."""
    return heedful.load(name, dtype=torch.float32)


def array(found: dict[str, Any]) -> torch.Tensor:
    numbers = np.frombuffer(base64.b64decode(found["data"]), dtype="<f4")
    assert numbers.size == math.prod(found["shape"])
    return torch.from_numpy(numbers.copy()).view(found["shape"])


def same(found: Any, expected: Any, *, atol: float = 2e-5) -> None:
    """Equal but for the order of sums: the server packs weights."""
    found = array(found) if isinstance(found, dict) else torch.tensor(found)
    torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=atol, rtol=1e-4)


def asked(client: Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a question that is right."""
    response = client.post(f"/api/{path}", body)
    assert response.status_code == 200, response.text
    return response.json()


def pieces(tokens: list[dict[str, Any]]) -> list[str]:
    assert all(set(token) == {"id", "text", "raw", "special"} for token in tokens)
    return [token["text"] for token in tokens]
