"""POST /api/image/classify and /api/image/complete, GET /api/images: images, as levels from 0 to 1 row by row.

C channels, H height, W width, L layers, N pixels, K levels of grey
"""

from __future__ import annotations

import json
import secrets
from contextlib import AsyncExitStack
from functools import cache
from importlib import resources
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.generate.request import Request, Sampling
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.models.base import Model
from heedful.models.image_gpt import ImageGPT
from heedful.models.vit import ViT
from heedful.observe import attention as look
from heedful.observe.inputs import image_input
from heedful.serve.errors import client_errors
from heedful.serve.generation import EventStream, SubRequest, submit
from heedful.serve.playground.desk import Desk, ask
from heedful.serve.playground.shapes import Image, Index, Name, check_bytes, reply
from heedful.serve.request_schema import MAX_INT, Count, Number, RequestBody

router = APIRouter()
MOST_LEVELS = 256  # a larger palette is one of colours, and not in a model's files


class ImageBody(RequestBody):
    model: Name
    image: Image


class CompleteBody(ImageBody):
    n_given: Index
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    seed: Annotated[Count, Field(ge=0, le=MAX_INT - 64)] | None = None
    n: Annotated[Count, Field(ge=1, le=16)] = 1


@router.get("/api/images")
async def examples(http: HttpRequest) -> Response:
    return await reply(http, {"digits": digits()})


@router.post("/api/image/classify")
async def classify(http: HttpRequest, body: ImageBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: labels(desk, body.image)))


@cache
def digits() -> list[dict[str, Any]]:
    """Two of each of the digits that come with scikit-learn; the file says whose they are."""
    text = resources.files("heedful.serve.playground").joinpath("digits.json").read_text(encoding="utf-8")
    told = json.loads(text)
    top = told["top"]
    return [
        {"label": digit["label"], "image": [[level / top for level in row] for row in digit["image"]]}
        for digit in told["digits"]
    ]


# --- classify ---------------------------------------------------------------------------------------------------------


def to_tensor(model: Model, image: list[Any]) -> Tensor:
    """An image as a vision model reads it, (C, H, W) from -1 to 1."""
    if not isinstance(model, ViT):
        raise ValueError(f"a {model.family} model does not read images as they are")
    size, channels = model.config.patch_size, model.config.n_channels
    rows = [[pixel if isinstance(pixel, list) else [pixel] * channels for pixel in row] for row in image]
    height, width = len(rows), len(rows[0])
    if any(len(row) != width for row in rows):
        raise ValueError("the rows of the image are not all of one length")
    if any(len(pixel) != channels for row in rows for pixel in row):
        raise ValueError(f"this model reads pixels of {channels} channels")
    if height % size or width % size:
        raise ValueError(f"the image is {height} x {width}: its sides must be multiples of {size}, the patches'")
    return torch.tensor(rows).permute(2, 0, 1) * 2 - 1


def attended(model: Model, image: list[Any]) -> tuple[list[int], Tensor]:
    """How many rows and columns of patches an image has, and the weights of every layer (L, H, 1 + N, 1 + N)."""
    pixels = to_tensor(model, image)
    assert isinstance(model, ViT)
    c = model.config
    grid = [len(image) // c.patch_size, len(image[0]) // c.patch_size]
    check_bytes(4 * c.n_layers * c.n_heads * (1 + grid[0] * grid[1]) ** 2, "the attention over an image")
    return grid, torch.stack(list(look.attention_weights(model, image_input(model, pixels)).values()))


def over_image(weights: Tensor, grid: list[int]) -> Tensor:
    """How much of each patch has come to [CLS] by each layer, (L, rows, columns)."""
    return look.rollout(weights)[:, 0, 1:].unflatten(1, grid)


def labels(desk: Desk, image: list[Any]) -> dict[str, Any]:
    desk.loaded.require("classify")
    pixels = to_tensor(desk.model, image)

    def make() -> dict[str, Any]:
        found = [{"label": label.name, "probability": label.score} for label in desk.loaded.classify(pixels)]
        grid, weights = attended(desk.model, image)
        return {"labels": found, "grid": grid, "rollout": over_image(weights, grid)[-1], "weights": weights}

    return desk.keep(("image", tuple(pixels.flatten().tolist()), tuple(pixels.shape)), make)


# --- complete ---------------------------------------------------------------------------------------------------------


@router.post("/api/image/complete")
async def complete(http: HttpRequest, body: CompleteBody) -> Response:
    """A stream of pixels: {"index", "pixel", "value"} each, then [DONE]."""
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(http.app.state.manager.acquire(body.model))
            begun, top, longest = beginning(worker.loaded, body)
            # Torch's own state is the same whenever a server starts.
            seed = secrets.randbits(30) if body.seed is None else body.seed
            subrequests = []
            for i in range(body.n):
                how = Sampling(temperature=body.temperature, seed=seed + i)
                subrequests.append(SubRequest(Request(begun, None, longest - body.n_given, how), i, i, 1))
            group = submit(worker, subrequests, stream=True)
        return EventStream(group, subrequests, Pixels(body.n_given, top), held.pop_all())


def beginning(loaded: Loaded, body: CompleteBody) -> tuple[tuple[int, ...], int, int]:
    """The first pixels as tokens, the brightest level, and how many pixels an image has."""
    loaded.require("complete_image")
    model = loaded.model
    assert isinstance(model, ImageGPT)
    top, longest = model.config.vocab_size - 2, model.config.max_len
    if top >= MOST_LEVELS:
        raise ValueError(f"{loaded.name} has a palette of {top + 1} colours, which is not in its files")
    flat = [pixel for row in body.image for pixel in row if not isinstance(pixel, list)]
    if len(flat) != longest:
        raise ValueError(f"{loaded.name} reads {longest} grey pixels, not {len(flat)}")
    if body.n_given >= longest:
        raise ValueError(f"n_given is {body.n_given}: fewer than {longest} pixels leave something to complete")
    return (model.start_id, *(round(pixel * top) for pixel in flat[: body.n_given])), top, longest


class Pixels:
    """What the stream says."""

    def __init__(self, first: int, top: int) -> None:
        self.first, self.top = first, top
        self.written: dict[int, int] = {}

    def chunk(self, sub: SubRequest, event: Event) -> str:
        if event.token is None:
            return ""
        place = self.written.get(sub.first, 0)
        self.written[sub.first] = place + 1
        said = {"index": sub.first, "pixel": self.first + place, "value": event.token / self.top}
        return f"data: {json.dumps(said)}\n\n"

    def final_chunk(self) -> str:
        return ""
