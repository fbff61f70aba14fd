"""POST /api/image/classify and /api/image/complete, GET /api/images: images, as rows of levels from 0 to 1.

C channels, H height, W width, L layers, N pixels, K colours
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
from heedful.models.image_gpt import ImageGPT, quantize
from heedful.models.vit import ViT
from heedful.observe import attention as observed
from heedful.observe.inputs import image_input
from heedful.serve.errors import client_errors
from heedful.serve.event_stream import ChunkFormatter, EventStream
from heedful.serve.field_types import MAX_INT, Count, Number
from heedful.serve.generation import SubRequest, submit
from heedful.serve.handle import client_of
from heedful.serve.playground.inspection import Inspector, run_on_model
from heedful.serve.playground.wire import (
    ARRAYS_RESPONSE,
    FloatArray,
    Image,
    Index,
    LabelProbability,
    ModelName,
    PlaygroundModel,
    check_response_size,
    encode_response,
)
from heedful.serve.request_schema import RequestBody
from heedful.tasks.drawing import prepare_drawing, reads_drawings

router = APIRouter()
Levels = list[float] | list[list[float]]  # of each colour of a palette: grey, or by channel


class ImageRequest(RequestBody):
    """An image for a model."""

    model: ModelName
    image: Image


class ImageCompletionRequest(ImageRequest):
    """An image of which the first `n_given` pixels are given, and how to sample the others, `n` times."""

    n_given: Index
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    seed: Annotated[Count, Field(ge=0, le=MAX_INT - 64)] | None = None
    n: Annotated[Count, Field(ge=1, le=16)] = 1


class LabelledDigit(PlaygroundModel):
    """A handwritten digit, as rows of levels from 0 to 1."""

    label: int
    image: list[list[float]]


class LabelledClothing(PlaygroundModel):
    """A picture of a piece of clothing, as rows of levels from 0 to 1."""

    label: str
    image: list[list[float]]


class ImagesResponse(PlaygroundModel):
    """Example images."""

    digits: list[LabelledDigit]
    mnist: list[LabelledDigit]
    clothes: list[LabelledClothing]


class ImageClassificationResponse(PlaygroundModel):
    """The classes of an image, and the attention over its patches."""

    labels: list[LabelProbability]
    grid: list[int] = Field(description="Rows and columns of patches")
    rollout: FloatArray = Field(description="(rows, columns): what has come to [CLS] after the last layer")
    weights: FloatArray = Field(description="(layers, heads, 1 + patches, 1 + patches), [CLS] first")


class PixelEvent(PlaygroundModel):
    """A pixel of a stream: which of the `n` images, its index in that image, its level from 0 to 1; of an image in
    colour, the levels of red, green and blue."""

    index: int
    pixel: int
    value: float | list[float]


@router.get("/api/images", response_model=ImagesResponse)
async def get_images(http: HttpRequest) -> Response:
    """Example images: two of each digit of 8 x 8 pixels, one of each of 28 x 28, and one of each kind of clothing."""
    images = {"digits": example_digits(), "mnist": example_mnist(), "clothes": example_clothes()}
    return await encode_response(http, images)


@router.post("/api/image/classify", response_model=ImageClassificationResponse, responses=ARRAYS_RESPONSE)
async def post_image_classify(http: HttpRequest, body: ImageRequest) -> Response:
    """The classes of an image, and the attention over its patches."""
    return await encode_response(
        http, await run_on_model(http, body.model, lambda i: image_classification(i, body.image))
    )


@cache
def example_digits() -> list[dict[str, Any]]:
    """Two of each of the digits that come with scikit-learn; the file names their source."""
    return _stored_images("digits")


@cache
def example_mnist() -> list[dict[str, Any]]:
    """One training image of each class of MNIST; the file names their source."""
    return _stored_images("mnist")


@cache
def example_clothes() -> list[dict[str, Any]]:
    """One image of each class of Fashion-MNIST; the file names their source."""
    return _stored_images("clothes")


def _stored_images(name: str) -> list[dict[str, Any]]:
    text = resources.files("heedful.serve.playground").joinpath(f"{name}.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    top = stored["top"]
    return [
        {"label": one["label"], "image": [[level / top for level in row] for row in one["image"]]}
        for one in stored[name]
    ]


# --- classify ---------------------------------------------------------------------------------------------------------


def image_to_tensor(model: Model, image: list[Any]) -> Tensor:
    """An image as a vision model reads it, (C, H, W) from -1 to 1."""
    if not isinstance(model, ViT):
        raise ValueError(f"a {model.family} model does not read images as they are")
    patch, channels = model.config.patch, model.config.n_channels
    rows = [[pixel if isinstance(pixel, list) else [pixel] * channels for pixel in row] for row in image]
    height, width = len(rows), len(rows[0])
    if any(len(row) != width for row in rows):
        raise ValueError("the rows of the image are not all of one length")
    if any(len(pixel) != channels for row in rows for pixel in row):
        raise ValueError(f"this model reads pixels of {channels} channels")
    if height % patch[0] or width % patch[1]:
        sides = str(patch[0]) if patch[0] == patch[1] else f"{patch[0]} and {patch[1]}"
        raise ValueError(f"the image is {height} x {width}: its sides must be multiples of {sides}, the patches'")
    return torch.tensor(rows).permute(2, 0, 1) * 2 - 1


def read_image(model: Model, image: list[Any]) -> Tensor:
    """`image_to_tensor`, of a drawing for a model that was trained on scanned digits as those are."""
    pixels = image_to_tensor(model, image)
    return prepare_drawing(model, pixels) if reads_drawings(model) else pixels


def image_attention(model: Model, image: list[Any]) -> tuple[list[int], Tensor]:
    """The rows and columns of patches of an image, and the weights of every layer (L, H, 1 + N, 1 + N)."""
    pixels = read_image(model, image)
    assert isinstance(model, ViT)
    c = model.config
    grid = [pixels.shape[1] // c.patch[0], pixels.shape[2] // c.patch[1]]
    check_response_size(4 * c.n_layers * c.n_heads * (1 + grid[0] * grid[1]) ** 2, "the attention over an image")
    return grid, torch.stack(list(observed.attention_weights(model, image_input(model, pixels)).values()))


def rollout_to_cls(weights: Tensor, grid: list[int]) -> Tensor:
    """Attention rollout from each patch to [CLS] by layer, (L, rows, columns)."""
    return observed.rollout(weights)[:, 0, 1:].unflatten(1, grid)


def image_classification(inspector: Inspector, image: list[Any]) -> dict[str, Any]:
    """An ImageClassificationResponse, cached."""
    inspector.loaded.require("classify")
    pixels = read_image(inspector.model, image)

    def compute() -> dict[str, Any]:
        labels = [{"label": label.name, "probability": label.score} for label in inspector.loaded.classify(pixels)]
        grid, weights = image_attention(inspector.model, image)
        return {"labels": labels, "grid": grid, "rollout": rollout_to_cls(weights, grid)[-1], "weights": weights}

    return inspector.cached(("image", tuple(pixels.flatten().tolist()), tuple(pixels.shape)), compute)


# --- complete ---------------------------------------------------------------------------------------------------------

PIXEL_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events: the data of each is a PixelEvent, of the last `[DONE]`",
        "content": {"text/event-stream": {"schema": PixelEvent.model_json_schema()}},
    }
}


@router.post("/api/image/complete", response_class=Response, responses=PIXEL_STREAM)
async def post_image_complete(http: HttpRequest, body: ImageCompletionRequest) -> Response:
    """A stream of the pixels that complete an image."""
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(http.app.state.manager.acquire(body.model))
            prompt, levels = pixel_prompt(worker.loaded, body)
            n_pixels = worker.loaded.model.config.max_len
            # Torch's own generator has the same state in every new process.
            seed = secrets.randbits(30) if body.seed is None else body.seed
            subrequests = []
            for i in range(body.n):
                sampling = Sampling(temperature=body.temperature, seed=seed + i)
                subrequests.append(SubRequest(Request(prompt, None, n_pixels - body.n_given, sampling), i, i, 1))
            group = submit(worker, subrequests, stream=True, client=client_of(http))
        return EventStream(group, subrequests, PixelStream(body.n_given, levels), held.pop_all())


def pixel_prompt(loaded: Loaded, body: ImageCompletionRequest) -> tuple[tuple[int, ...], Levels]:
    """The given pixels as tokens, and the levels from 0 to 1 of each colour of the model's palette."""
    loaded.require("complete_image")
    model = loaded.model
    assert isinstance(model, ImageGPT)
    palette, n_pixels = model.palette, model.config.max_len  # (K, C)
    channels = palette.shape[1]
    flat = [pixel if isinstance(pixel, list) else [pixel] * channels for row in body.image for pixel in row]
    if len(flat) != n_pixels or any(len(pixel) != channels for pixel in flat):
        kind = "grey pixels" if channels == 1 else f"pixels of {channels} channels"
        raise ValueError(f"{loaded.name} reads {n_pixels} {kind}, and the image has {len(flat)} or others")
    if body.n_given >= n_pixels:
        raise ValueError(f"n_given is {body.n_given}: fewer than {n_pixels} pixels leave something to complete")
    given = torch.tensor(flat[: body.n_given]).view(1, -1, 1, channels).permute(0, 3, 1, 2)  # (1, C, N, 1)
    ids = quantize(given * 2 - 1, palette)[0].tolist() if body.n_given else []
    levels = (palette / 2 + 0.5).clamp(0, 1)
    return (model.start_id, *ids), levels[:, 0].tolist() if channels == 1 else levels.tolist()


class PixelStream(ChunkFormatter):
    """Formats the events of the engine as server-sent PixelEvents."""

    def __init__(self, first: int, levels: Levels) -> None:
        self.first, self.levels = first, levels
        self.written: dict[int, int] = {}

    def chunk(self, sub: SubRequest, event: Event) -> str:
        """The text of the stream for one event; empty where it has no token."""
        if event.token is None:
            return ""
        place = self.written.get(sub.first, 0)
        self.written[sub.first] = place + 1
        pixel = {"index": sub.first, "pixel": self.first + place, "value": self.levels[event.token]}
        return f"data: {json.dumps(pixel)}\n\n"
