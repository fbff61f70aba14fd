"""The wire format: request fields with their limits, models of what responses share, and the encoding of arrays."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.serve.errors import ApiError
from heedful.serve.field_types import Count, FieldError, Flag, Number, Text
from heedful.serve.playground.inspection import Inspector, memory_size
from heedful.serve.request_schema import RequestBody
from heedful.serve.response_schema import ResponseModel
from heedful.text.limits import TextTooLong

MAX_CHARACTERS = 20_000  # of a text
MAX_TOKENS = 512  # whose attention is shown
MAX_RESPONSE_BYTES = 64 * 2**20  # of the arrays of all layers
THREAD_BYTES = 2**16  # a larger response is encoded in a thread, not in the event loop
ARRAYS_MEDIA_TYPE = "application/vnd.heedful.arrays"  # see `encode_arrays`

# --- requests ---------------------------------------------------------------------------------------------------------


def _check_length(value: str) -> str:
    if len(value) > MAX_CHARACTERS:
        raise FieldError("", f"has {len(value):,} characters: at most {MAX_CHARACTERS:,} are read here")
    return value


ModelName = Text
ShortText = Annotated[Text, AfterValidator(_check_length)]
Index = Annotated[Count, Field(ge=0)]
Level = Annotated[Number, Field(ge=0, le=1)]
Pixel = Level | Annotated[list[Level], Field(min_length=3, max_length=3)]  # grey, or red, green, blue
Image = Annotated[list[Annotated[list[Pixel], Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=64)]


class TextRequest(RequestBody):
    """A model and a text for it."""

    model: ModelName
    text: ShortText


class PromptRequest(TextRequest):
    """A model and a text for it, which a chat template may have rendered."""

    rendered: Flag = Field(
        default=False,
        description="The text is a chat template's: special tokens in it are those tokens, and none are added",
    )


def check_token_count(inspector: Inspector, n: int, most: int | None = None) -> None:
    """TextTooLong for more tokens than the model reads, or than `most`."""
    least = min(x for x in (n, most, inspector.model.context_length) if x is not None)
    if n > least:
        raise TextTooLong(f"the text has {n:,} tokens, and at most {least:,} are read here: shorten it")


def check_response_size(n: int, what: str) -> None:
    """ValueError for a response of more than MAX_RESPONSE_BYTES."""
    if n > MAX_RESPONSE_BYTES:
        most = MAX_RESPONSE_BYTES // 2**20
        raise ValueError(f"{what} would be {n / 2**20:.0f} MB here: at most {most} are sent, so give less")


# --- responses: models for /openapi.json, from which the page's types are generated; the tests check them -------------


class PlaygroundModel(ResponseModel):
    """A JSON object of a response, without any other fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TextResponse(PlaygroundModel):
    """What a model made of a text, and what there is to know about it."""

    warnings: list[str] = Field(description="That the text was cut, or is in a script that the model does not know")


class FloatArray(PlaygroundModel):
    """An array of float32 numbers, little-endian, in base64."""

    shape: list[int]
    dtype: Literal["float32"]
    data: str


class ByteArray(PlaygroundModel):
    """An array of bytes, in base64."""

    shape: list[int]
    dtype: Literal["uint8"]
    data: str


class Token(PlaygroundModel):
    """A token: its id, the text it stands for, its name in the vocabulary, and whether it is a special one."""

    id: int
    text: str
    raw: str
    special: bool


class TokenProbability(PlaygroundModel):
    """A token and its probability."""

    token: Token
    probability: float


class LabelProbability(PlaygroundModel):
    """A class and its probability."""

    label: str
    probability: float


# What a route says of a response that has arrays, for its `responses`.
ARRAYS_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": f"JSON; with `accept: {ARRAYS_MEDIA_TYPE}` the same with the arrays as bytes after it",
        "content": {ARRAYS_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


# --- encoding ---------------------------------------------------------------------------------------------------------


def to_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as it is sent: uint8 as it is, anything else as little-endian float32."""
    if x.dtype == torch.uint8:
        return x.detach().cpu().contiguous().numpy()
    if bool(x.sum().isnan()) and bool(x.isnan().any()):  # the sum alone is faster
        raise ApiError(500, "the model computed a number that is not one", code="model_failed")
    return x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)


def encode_json(content: Any) -> bytes:
    """JSON in which a tensor is {"shape": [2, 3], "dtype": "float32", "data": its bytes in base64}."""

    def encode_tensor(x: Tensor) -> dict[str, Any]:
        data = to_numpy(x)
        return {
            "shape": x.shape,
            "dtype": data.dtype.name,
            "data": base64.b64encode(data.data).decode("ascii"),
        }

    return _dumps(content, encode_tensor)


def encode_arrays(content: Any) -> bytes:
    """The length of the JSON (4 bytes, little-endian), the JSON, and the bytes of its arrays one after the other.

    In the JSON a tensor is {"shape": [2, 3], "dtype": "float32", "at": its offset in bytes after the JSON}. The JSON is
    padded with spaces and each array with zeros to a multiple of 4, so that arrays can be used in place.
    """
    parts, end = list[Any](), 0

    def encode_tensor(x: Tensor) -> dict[str, Any]:
        nonlocal end
        data, at = to_numpy(x), end
        parts.extend((data.data, bytes(-data.nbytes % 4)))
        end += data.nbytes + -data.nbytes % 4
        return {"shape": x.shape, "dtype": data.dtype.name, "at": at}

    text = _dumps(content, encode_tensor)
    text += b" " * (-len(text) % 4)
    return b"".join([len(text).to_bytes(4, "little"), text, *parts])


def _dumps(content: Any, encode_tensor: Callable[[Tensor], dict[str, Any]]) -> bytes:
    try:
        return json.dumps(content, default=encode_tensor, allow_nan=False).encode()
    except ValueError:  # JSON has no infinity
        raise ApiError(500, "the model computed a number that is not finite", code="model_failed") from None


async def encode_response(http: HttpRequest, content: dict[str, Any]) -> Response:
    """A response in JSON, or as `encode_arrays` has it if there are tensors in it and the client accepts that."""
    accepted = [part.partition(";")[0].strip() for part in http.headers.get("accept", "").split(",")]
    media_type = ARRAYS_MEDIA_TYPE if ARRAYS_MEDIA_TYPE in accepted and has_tensor(content) else "application/json"
    encode = encode_arrays if media_type == ARRAYS_MEDIA_TYPE else encode_json
    large = memory_size(content) > THREAD_BYTES
    body = await asyncio.to_thread(encode, content) if large else encode(content)
    return Response(body, media_type=media_type, headers={"cache-control": "no-store", "vary": "accept"})


def with_warnings(http: HttpRequest, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a TextResponse: with the warnings of what ran on models for this request."""
    return {**content, "warnings": http.scope["state"].get("warnings", [])}


def has_tensor(content: Any) -> bool:
    """Whether there is a tensor in nested dicts and lists."""
    if isinstance(content, dict):
        return any(map(has_tensor, content.values()))
    return isinstance(content, Tensor) or (isinstance(content, list) and any(map(has_tensor, content)))
