"""What goes over the wire: the fields that bodies share with their limits, arrays in base64, and replies in JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from starlette.responses import Response
from torch import Tensor

from heedful.serve.errors import ApiError
from heedful.serve.playground.desk import Desk, n_bytes
from heedful.serve.schema import Body, Count, Number, Text, Wrong

LONGEST = 20_000  # characters of a text
MOST_TOKENS = 512  # of which attention is shown
LARGE = 2**16  # bytes: JSON of more is made beside the event loop


def _short(value: str) -> str:
    if len(value) > LONGEST:
        raise Wrong("", f"has {len(value):,} characters: at most {LONGEST:,} are read here")
    return value


Name = Text  # of a model
Passage = Annotated[Text, AfterValidator(_short)]
Index = Annotated[Count, Field(ge=0)]
Level = Annotated[Number, Field(ge=0, le=1)]
Pixel = Level | Annotated[list[Level], Field(min_length=3, max_length=3)]  # grey, or red, green, blue
Image = Annotated[
    list[Annotated[list[Pixel], Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=64)
]


class OfText(Body):
    """A model and a text for it."""

    model: Name
    text: Passage


def check_count(desk: Desk, n: int, most: int | None = None) -> None:
    """ValueError for more tokens than the model reads, or than are shown."""
    desk.model.check_length(n)
    if most is not None and n > most:
        raise ValueError(f"the text has {n} tokens, and at most {most} are shown here: shorten it")


def array(x: Tensor) -> bytes:
    """An array for the page, in JSON: its shape, and its numbers as little-endian float32 in base64."""
    if bool(x.sum().isnan()) and bool(x.isnan().any()):  # the sum is sooner there
        raise ApiError(500, "the model computed a number that is not one", code="model_failed")
    numbers = x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return b'{"shape": %s, "data": "%s"}' % (
        json.dumps(list(x.shape)).encode(),
        base64.b64encode(numbers.data),
    )


def encode(found: dict[str, Any]) -> bytes:
    """JSON of a reply, in which tensors are arrays. They are put in last: JSON would look at each of their letters."""
    arrays, mark = list[Tensor](), secrets.token_hex(16)

    def later(x: Tensor) -> str:
        arrays.append(x)
        return mark

    try:
        first, *rest = json.dumps(found, default=later, allow_nan=False).encode().split(f'"{mark}"'.encode())
    except ValueError:  # JSON has no infinity
        raise ApiError(500, "the model computed a number that is not finite", code="model_failed") from None
    return b"".join(
        [first, *(part for x, after in zip(arrays, rest, strict=True) for part in (array(x), after))]
    )


async def reply(found: dict[str, Any]) -> Response:
    large = n_bytes(found) > LARGE
    body = await asyncio.to_thread(encode, found) if large else encode(found)
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
