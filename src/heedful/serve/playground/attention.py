"""POST /api/attention and its kin: the weights of a layer, thumbnails of all, the neuron view, alignment, rollout.

H heads, T rows (queries), S columns (keys), L layers, D head size
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.observe import attention as observed
from heedful.serve.field_types import Flag
from heedful.serve.playground.attention_view import (
    AttentionKind,
    AttentionRequest,
    MaskedTokens,
    generated_text,
    layer_activations,
    layer_weights,
    reduce_all_layers,
    requested_view,
)
from heedful.serve.playground.images import image_attention, rollout_to_cls
from heedful.serve.playground.inspection import Inspector, run_on_model
from heedful.serve.playground.neuron import ACTIVATIONS_NEEDED, neuron_view, score_scale
from heedful.serve.playground.wire import (
    ARRAYS_RESPONSE,
    ByteArray,
    FloatArray,
    Image,
    Index,
    ModelName,
    PlaygroundModel,
    ShortText,
    Token,
    check_response_size,
    encode_response,
)
from heedful.serve.request_schema import RequestBody

router = APIRouter()
THUMBNAIL_SIDE = 32  # pixels at most


class LayerRequest(AttentionRequest):
    """One layer of an attention."""

    layer: Index = 0


class NeuronRequest(LayerRequest):
    """One query of one head of a layer."""

    head: Index = 0
    index: Index


class AlignmentRequest(RequestBody):
    """A source, an encoder-decoder's output (by default its own), and masked source tokens."""

    model: ModelName
    source: ShortText
    target: ShortText | None = None
    masked: MaskedTokens = Field(default=[])


class RolloutRequest(RequestBody):
    """A text or an image."""

    model: ModelName
    text: ShortText | None = None
    target: ShortText | None = None
    image: Image | None = None
    which: Literal["self", "encoder"] = "self"
    masked: MaskedTokens = Field(default=[])
    rendered: Flag = False


class AttentionMap(PlaygroundModel):
    """What the responses about a text's attention share."""

    from_: list[Token] = Field(alias="from", description="Queries, the rows")
    to: list[Token] = Field(description="Keys, the columns")
    n_layers: int
    n_heads: int
    which: AttentionKind
    kinds: list[AttentionKind] = Field(description="The kinds of attention that the model has")


class LayerResponse(AttentionMap):
    """The attention weights of one layer."""

    layer: int
    weights: FloatArray = Field(description="(heads, from, to)")
    hidden: list[Token] = Field(description="The masked tokens, in the order of their columns")
    answer: str | None = Field(description="What an encoder-decoder generated")


class OverviewResponse(AttentionMap):
    """Every head of every layer, small."""

    thumbnails: ByteArray = Field(description="(layers, heads, side, side): the largest weight in each part, 255 is 1")


class NeuronResponse(PlaygroundModel):
    """One query against all keys."""

    tokens: list[Token]
    query: list[float]
    keys: FloatArray = Field(description="(tokens, head size)")
    products: FloatArray = Field(description="(tokens, head size)")
    scores: list[float | None] = Field(description="null where the mask forbids attention")
    weights: list[float]
    scale: float


class AlignmentResponse(PlaygroundModel):
    """The cross-attention of all layers and heads."""

    source: list[Token]
    target: list[Token]
    weights: FloatArray = Field(description="(layers, heads, target, source)")
    text: str | None


class TextRolloutResponse(PlaygroundModel):
    """The attention rollout over a text."""

    tokens: list[Token]
    weights: FloatArray = Field(description="(layers, tokens, tokens)")
    hidden: list[Token] = Field(description="The masked tokens, in their order")


class ImageRolloutResponse(PlaygroundModel):
    """The attention rollout from an image's patches to [CLS]."""

    grid: list[int] = Field(description="Rows and columns of patches")
    weights: FloatArray = Field(description="(layers, rows, columns)")


@router.post("/api/attention", response_model=LayerResponse, responses=ARRAYS_RESPONSE)
async def post_attention(http: HttpRequest, body: LayerRequest) -> Response:
    """The attention weights of one layer."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: layer_response(i, body)))


@router.post("/api/attention/overview", response_model=OverviewResponse, responses=ARRAYS_RESPONSE)
async def post_attention_overview(http: HttpRequest, body: AttentionRequest) -> Response:
    """Thumbnails of the attention of every head of every layer."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: overview_response(i, body)))


@router.post("/api/attention/neuron", response_model=NeuronResponse, responses=ARRAYS_RESPONSE)
async def post_attention_neuron(http: HttpRequest, body: NeuronRequest) -> Response:
    """How one query of a head scores its keys, dimension by dimension."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: neuron_response(i, body)))


@router.post("/api/alignment", response_model=AlignmentResponse, responses=ARRAYS_RESPONSE)
async def post_alignment(http: HttpRequest, body: AlignmentRequest) -> Response:
    """The cross-attention of an encoder-decoder, all layers and heads."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: alignment_response(i, body)))


@router.post("/api/rollout", response_model=TextRolloutResponse | ImageRolloutResponse, responses=ARRAYS_RESPONSE)
async def post_rollout(http: HttpRequest, body: RolloutRequest) -> Response:
    """Attention rollout (Abnar and Zuidema 2020), over a text or an image."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: rollout_response(i, body)))


def layer_response(inspector: Inspector, body: LayerRequest) -> dict[str, Any]:
    """A LayerResponse."""
    view = requested_view(inspector, body)
    return {
        "from": view.rows,
        "to": view.columns,
        "layer": body.layer,
        "n_layers": len(view.layers),
        "n_heads": view.n_heads,
        "which": view.which,
        "kinds": view.kinds,
        "weights": layer_weights(inspector, view, body.layer),
        "hidden": view.hidden,
        "answer": generated_text(inspector, view.inputs),
    }


def overview_response(inspector: Inspector, body: AttentionRequest) -> dict[str, Any]:
    """An OverviewResponse."""
    view = requested_view(inspector, body)
    side = min(THUMBNAIL_SIDE, max(len(view.rows), len(view.columns)))
    small = inspector.cached(
        ("thumbnails", view.key), lambda: reduce_all_layers(inspector, view, lambda x: thumbnail(x, side))
    )
    return {
        "from": view.rows,
        "to": view.columns,
        "n_layers": len(view.layers),
        "n_heads": view.n_heads,
        "which": view.which,
        "kinds": view.kinds,
        "thumbnails": small,
    }


def thumbnail(weights: Tensor, side: int) -> Tensor:
    """Weights (H, T, S) max-pooled to uint8 (H, side, side), 255 is 1."""
    pooled = F.adaptive_max_pool2d(weights, (side, side))
    return (255 * pooled).round().clamp_(0, 255).to(torch.uint8)


def neuron_response(inspector: Inspector, body: NeuronRequest) -> dict[str, Any]:
    """A NeuronResponse."""
    view = requested_view(inspector, body)
    scale = score_scale(inspector.model, view.layer_name(body.layer))
    activations = layer_activations(inspector, view, body.layer, *ACTIVATIONS_NEEDED)
    return {"tokens": view.columns, **neuron_view(activations, scale, body.head, body.index)}


def alignment_response(inspector: Inspector, body: AlignmentRequest) -> dict[str, Any]:
    """An AlignmentResponse."""
    if "cross" not in observed.attention_kinds(inspector.model):
        raise ValueError(f"{inspector.loaded.name} looks at no source: only encoder-decoders with attention do")
    fields = body.model_dump(include={"model", "target", "masked"})
    view = requested_view(inspector, AttentionRequest(**fields, text=body.source, which="cross"))
    check_response_size(4 * view.n_weights, "an alignment of all layers")
    weights = inspector.cached(
        ("alignment", view.key), lambda: reduce_all_layers(inspector, view, lambda x: x)
    )  # (L, H, T, S)
    text = generated_text(inspector, view.inputs)
    return {"source": view.columns, "target": view.rows, "weights": weights, "text": text}


def rollout_response(inspector: Inspector, body: RolloutRequest) -> dict[str, Any]:
    """A TextRolloutResponse or an ImageRolloutResponse."""
    if (body.text is None) == (body.image is None):
        raise ValueError("give either a text or an image")
    if body.image is not None:
        if body.masked or body.target is not None:
            raise ValueError("an image has no tokens to mask, and no target: give a text with them")
        grid, weights = image_attention(inspector.model, body.image)
        return {"grid": grid, "weights": rollout_to_cls(weights, grid)}
    fields = body.model_dump(include={"model", "text", "target", "which", "masked", "rendered"})
    view = requested_view(inspector, AttentionRequest(**fields))
    check_response_size(4 * view.n_weights // view.n_heads, "a rollout")

    def compute() -> Tensor:
        means = reduce_all_layers(inspector, view, lambda x: x.mean(dim=0, keepdim=True))  # (L, 1, T, T)
        return observed.rollout(means)  # its first step is the mean of the heads

    weights = inspector.cached(("rollout", view.key), compute)
    return {"tokens": view.rows, "weights": weights, "hidden": view.hidden}
