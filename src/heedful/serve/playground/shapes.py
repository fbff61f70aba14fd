"""What goes over the wire: the fields that bodies share with their limits, and replies with their arrays."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.serve.errors import ApiError
from heedful.serve.playground.desk import Desk, n_bytes
from heedful.serve.request_schema import Count, FieldError, Number, RequestBody, Text

LONGEST = 20_000  # characters of a text
MOST_TOKENS = 512  # of which attention is shown
MOST_BYTES = 64 * 2**20  # of what is sent for all layers at once
LARGE = 2**16  # bytes: a reply of more is made beside the event loop
ARRAYS = "application/vnd.heedful.arrays"  # see `with_arrays`


def _short(value: str) -> str:
    if len(value) > LONGEST:
        raise FieldError("", f"has {len(value):,} characters: at most {LONGEST:,} are read here")
    return value


Name = Text  # of a model
Passage = Annotated[Text, AfterValidator(_short)]
Index = Annotated[Count, Field(ge=0)]
Level = Annotated[Number, Field(ge=0, le=1)]
Pixel = Level | Annotated[list[Level], Field(min_length=3, max_length=3)]  # grey, or red, green, blue
Image = Annotated[list[Annotated[list[Pixel], Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=64)]


class OfText(RequestBody):
    """A model and a text for it."""

    model: Name
    text: Passage


def check_count(desk: Desk, n: int, most: int | None = None) -> None:
    """ValueError for more tokens than the model reads, or than are shown."""
    desk.model.check_length(n)
    if most is not None and n > most:
        raise ValueError(f"the text has {n} tokens, and at most {most} are shown here: shorten it")


def check_bytes(n: int, what: str) -> None:
    """ValueError for more than is sent at once."""
    if n > MOST_BYTES:
        most = MOST_BYTES // 2**20
        raise ValueError(f"{what} would be {n / 2**20:.0f} MB here: at most {most} are sent, so give less")


def numbers(x: Tensor) -> np.ndarray[Any, Any]:
    """What is sent of a tensor: bytes where it has bytes, else little-endian float32."""
    if x.dtype == torch.uint8:
        return x.detach().cpu().contiguous().numpy()
    if bool(x.sum().isnan()) and bool(x.isnan().any()):  # the sum is sooner there
        raise ApiError(500, "the model computed a number that is not one", code="model_failed")
    return x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)


def in_json(found: Any) -> bytes:
    """A reply in which an array is {"shape": [2, 3], "dtype": "float32", "data": its bytes in base64}."""

    def tell(x: Tensor) -> dict[str, Any]:
        data = numbers(x)
        return {
            "shape": x.shape,
            "dtype": data.dtype.name,
            "data": base64.b64encode(data.data).decode("ascii"),
        }

    return _dumped(found, tell)


def with_arrays(found: Any) -> bytes:
    """The same with the arrays as they are: the length of the JSON (4 bytes, little-endian), the JSON, the arrays. In
    the JSON an array is {"shape": [2, 3], "dtype": "float32", "at": where it begins, in bytes after the JSON}.

    The JSON ends in spaces and the arrays in zeros, so that each begins at a multiple of 4 and can be used in place.
    """
    parts, end = list[Any](), 0

    def tell(x: Tensor) -> dict[str, Any]:
        nonlocal end
        data, at = numbers(x), end
        parts.extend((data.data, bytes(-data.nbytes % 4)))
        end += data.nbytes + -data.nbytes % 4
        return {"shape": x.shape, "dtype": data.dtype.name, "at": at}

    text = _dumped(found, tell)
    text += b" " * (-len(text) % 4)
    return b"".join([len(text).to_bytes(4, "little"), text, *parts])


def _dumped(found: Any, tell: Callable[[Tensor], dict[str, Any]]) -> bytes:
    try:
        return json.dumps(found, default=tell, allow_nan=False).encode()
    except ValueError:  # JSON has no infinity
        raise ApiError(500, "the model computed a number that is not finite", code="model_failed") from None


async def reply(http: HttpRequest, found: dict[str, Any]) -> Response:
    """JSON, unless there are arrays in it and the client accepts them as they are."""
    accepted = [part.partition(";")[0].strip() for part in http.headers.get("accept", "").split(",")]
    kind = ARRAYS if ARRAYS in accepted and has_array(found) else "application/json"
    make = with_arrays if kind == ARRAYS else in_json
    body = await asyncio.to_thread(make, found) if n_bytes(found) > LARGE else make(found)
    return Response(body, media_type=kind, headers={"cache-control": "no-store", "vary": "accept"})


def has_array(found: Any) -> bool:
    if isinstance(found, dict):
        return any(map(has_array, found.values()))
    return isinstance(found, Tensor) or (isinstance(found, list) and any(map(has_array, found)))
