"""POST /api/steps/map: the whole forward pass of a decoder of any size as one picture.

Every step of every layer is reduced during the pass to a small image, so that never more than one layer's activations
are in memory, and the response has at most about MAX_MAP_BYTES of images whatever the model and the text.

    T tokens, E width, H heads, L layers, V vocabulary
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.models.base import DecoderModel
from heedful.models.image_gpt import ImageGPT
from heedful.nn.block import Block
from heedful.observe.capture import Activations, capture
from heedful.observe.names import activation_names
from heedful.serve.playground.inspection import Inspector, run_on_model
from heedful.serve.playground.steps import INSIDE, OUTPUTS, block_steps, bpe_merges, is_small
from heedful.serve.playground.steps_schema import WordMerges
from heedful.serve.playground.text import model_input, tokens_of
from heedful.serve.playground.wire import (
    ARRAYS_RESPONSE,
    MAX_TOKENS,
    ByteArray,
    FloatArray,
    Index,
    PlaygroundModel,
    TextRequest,
    Token,
    check_token_count,
    encode_response,
)

router = APIRouter()
MAX_MAP_LAYERS = 128
MAX_MAP_BYTES = 2**20
SIDES = (48, 32, 24, 16, 8)  # pixels of an image's side, the most that keep all of them within MAX_MAP_BYTES
N_NAMED = 2500  # likeliest next tokens that are sent with their texts
BY_HEAD = ("scores", "scaled", "masked", "weights")
# The steps of a block in order, where it has them, by the names of /api/steps (but see `layer_miniatures`).
STEPS = (
    "input", "normed", "q", "k", "v", "q_normed", "k_normed", "q_turned", "k_turned", *BY_HEAD, "concatenated",
    "attention_out", "attention_after", "summed", "residual", "normed2", "hidden", "gated", "activated", "shares",
    "feedforward_out", "feedforward_after", "summed2", "output",
)  # fmt: skip


class MapRequest(TextRequest):
    """A text, and the token whose row is followed: the last one if it is not given."""

    token: Index | None = None


class Miniature(PlaygroundModel):
    """A step as an image: 0 is empty (masked), else 128 is zero and 255 `full`; of shares that are never negative, 1
    is zero. A pixel of several numbers has the one of the largest magnitude."""

    id: str
    layer: int | None
    shape: list[int] = Field(description="Of the activation itself: (T, columns) or (H, T, T)")
    full: float = Field(description="The number of the fullest colour; larger ones have it too")
    image: ByteArray


class MapResponse(PlaygroundModel):
    """A forward pass in small images, and the choice of the next token."""

    tokens: list[Token]
    token: int = Field(description="The token that is followed")
    merges: list[WordMerges] | None
    small: bool = Field(description="Whether /api/steps shows every number of it")
    n_heads: int
    miniatures: list[Miniature]
    attention: ByteArray = Field(description="(L, H, T): whom the followed token attends to, 255 is 1")
    stream: FloatArray = Field(description="(L + 1): the norm of its residual stream, first before the first layer")
    logits: FloatArray = Field(description="(V): of the token after the last one")
    named: list[Token] = Field(description="The likeliest of them")


@router.post("/api/steps/map", response_model=MapResponse, responses=ARRAYS_RESPONSE)
async def post_steps_map(http: HttpRequest, body: MapRequest) -> Response:
    """The whole forward pass of a decoder as one picture."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: steps_map(i, body)))


def steps_map(inspector: Inspector, body: MapRequest) -> dict[str, Any]:
    """A MapResponse, cached."""
    model = inspector.model
    generates = "generate" in model.abilities
    if not (isinstance(model, DecoderModel) and generates) or isinstance(model, ImageGPT):
        raise ValueError(f"{inspector.loaded.name} does not go on with a text: choose a decoder, as tiny")
    if model.config.n_layers > MAX_MAP_LAYERS:
        raise ValueError(f"{inspector.loaded.name} has {model.config.n_layers} layers: at most {MAX_MAP_LAYERS} fit")
    n = len(tokens_of(inspector, body.text))
    check_token_count(inspector, n, MAX_TOKENS)
    if body.token is not None and body.token >= n:
        raise ValueError(f"there is no token {body.token} to follow: there are 0 to {n - 1}")
    token = n - 1 if body.token is None else body.token
    return inspector.cached(("map", body.text, token), lambda: _steps_map(inspector, model, body.text, token))


def _steps_map(inspector: Inspector, model: DecoderModel, text: str, token: int) -> dict[str, Any]:
    inputs = model_input(inspector, text)
    blocks = [block for block in model.decoder.blocks if isinstance(block, Block)]
    n_heads = blocks[0].attention.n_heads
    side = image_side(len(blocks), n_heads, len(inputs.ids))
    names = [name for name in activation_names(model) if name.split(".")[-1] in (*OUTPUTS, *INSIDE)]
    images, attention, stream = list[dict[str, Any]](), list[Tensor](), list[Tensor]()

    def reduce_block(i: int, acts: Activations) -> None:
        if i == 0:
            places = [name for name in ("embeddings", "positions") if f"decoder.{name}" in acts]
            images.extend(miniature(name, None, acts[f"decoder.{name}"][0], side) for name in places)
            stream.append(acts["decoder.0.before"][0, token].norm())
        found = block_steps(blocks[i], acts, f"decoder.{i}")
        images.extend(layer_miniatures(found, i, side, rotated=model.decoder.rotary is not None))
        attention.append((255 * found["weights"][:, token]).round().to(torch.uint8))
        stream.append(found["output"][token].norm())
        acts.clear()  # so that one layer's are in memory at a time

    with ExitStack() as stack, capture(model, [*names, "logits"]) as acts:
        for i, block in enumerate(blocks):  # after the hooks of `capture`, whose activations it reads
            hook = block.register_forward_hook(lambda _module, _inputs, _out, i=i: reduce_block(i, acts))
            stack.callback(hook.remove)
        model(inputs.batch)
        final, logits = acts["decoder.output"][0], acts["logits"][0, -1].float()
    return {
        "tokens": inspector.tokens(inputs.ids),
        "token": token,
        "merges": None if inspector.tokenizer is None else bpe_merges(inspector.tokenizer, text),
        "small": is_small(model),
        "n_heads": n_heads,
        "miniatures": [*images, miniature("final", None, final, side)],
        "attention": torch.stack(attention),
        "stream": torch.stack(stream).float(),
        "logits": logits,
        "named": inspector.tokens(logits.topk(min(N_NAMED, len(logits))).indices.tolist()),
    }


def image_side(n_layers: int, n_heads: int, n_tokens: int) -> int:
    """The largest side of the images with which all of them stay within MAX_MAP_BYTES."""
    n_images = n_layers * (len(STEPS) - len(BY_HEAD) + len(BY_HEAD) * n_heads)
    return next((side for side in SIDES if n_images * side * min(side, n_tokens) <= MAX_MAP_BYTES), SIDES[-1])


def layer_miniatures(found: dict[str, Any], layer: int, side: int, *, rotated: bool) -> list[dict[str, Any]]:
    """The steps of a block, from what `block_steps` gives: q and k are here the projections, q_turned and k_turned
    what attention compares. Heads of queries, keys and values are side by side."""
    final = {"q_turned": found["q"], "k_turned": found["k"]} if rotated else {}
    activations = {**found, "q": found["q_raw"], "k": found["k_raw"], **final}
    made = []
    for name in STEPS:
        x = activations.get(name)
        if x is None:
            continue
        if x.ndim == 3 and name not in BY_HEAD:
            x = x.transpose(0, 1).flatten(1)  # (H, T, D) -> (T, H·D)
        made.append(miniature(name, layer, x, side))
    return made


def miniature(name: str, layer: int | None, x: Tensor, side: int) -> dict[str, Any]:
    """A Miniature of an activation (T, columns) or (H, T, T)."""
    shape, x = list(x.shape), x.detach().float()
    x = x[None] if x.ndim == 2 else x
    size = (min(side, x.shape[1]), min(side, x.shape[2]))
    hidden = ~(x > -1e30)  # by the mask
    x = x.masked_fill(hidden, 0)
    above, below = F.adaptive_max_pool2d(x, size), F.adaptive_max_pool2d(-x, size)
    pooled = torch.where(above >= below, above, -below)
    share = name in ("weights", "shares")
    # A few dimensions of a residual stream are far larger than all others, which would be of one colour.
    full = pooled.max() if share else pooled.abs().flatten().quantile(0.98)
    full = full if full > 0 else torch.ones(())
    level = (pooled / full).clamp(-1, 1)
    codes = (1 + 254 * level if share else 128 + 127 * level).round()
    codes[F.adaptive_avg_pool2d(hidden.float(), size) == 1] = 0
    image = codes.to(torch.uint8)
    return {
        "id": name,
        "layer": layer,
        "shape": shape,
        "full": float(full),
        "image": image[0] if len(shape) == 2 else image,
    }
