"""POST /api/attention and its kin: maps of a layer, thumbnails of all, one neuron view, alignments, rollout.

`which` attention is asked for by the page's words: "self" is a model's own (the decoder's, where there are two
halves), "encoder" that of the encoder beside a decoder, "cross" the decoder's to the encoder. Tokens may be masked, by
their place among the columns: a masked model then reads [MASK]; in any other, no position but its own looks at them
(what a recurrent encoder has read, it has read).

    H heads, T rows ("from"), S columns ("to"), L layers, D head size
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.models.base import Batch, Model
from heedful.models.encoder import EncoderModel
from heedful.models.vit import ViT
from heedful.observe import attention as look
from heedful.observe.capture import Edit, capture, matching_names
from heedful.observe.inputs import ModelInput
from heedful.observe.names import activation_names
from heedful.serve.playground.desk import Desk, ask
from heedful.serve.playground.images import attended, over_image
from heedful.serve.playground.neuron import PARTS, neuron, scale_of
from heedful.serve.playground.passes import entering, passing, within
from heedful.serve.playground.shapes import (
    MOST_TOKENS,
    Image,
    Index,
    Name,
    OfText,
    Passage,
    check_bytes,
    reply,
)
from heedful.serve.playground.text import reading_of, sides
from heedful.serve.request_schema import RequestBody

router = APIRouter()
Which = Literal["self", "cross", "encoder"]
Masked = Annotated[list[Index], Field(max_length=MOST_TOKENS)]
ENTERING = 128 * 2**20  # bytes of what enters all layers; of a larger pass only one layer's is kept
THUMBNAIL = 32  # its side at most


class AttentionBody(OfText):
    target: Passage | None = None
    which: Which | None = None
    masked: Masked = Field(default=[])


class LayerBody(AttentionBody):
    layer: Index = 0


class NeuronBody(LayerBody):
    head: Index = 0
    index: Index


class AlignmentBody(RequestBody):
    model: Name
    source: Passage
    target: Passage | None = None
    masked: Masked = Field(default=[])


class RolloutBody(RequestBody):
    model: Name
    text: Passage | None = None
    target: Passage | None = None
    image: Image | None = None
    which: Literal["self", "encoder"] = "self"
    masked: Masked = Field(default=[])


@router.post("/api/attention")
async def attention(http: HttpRequest, body: LayerBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: layer_of(desk, body)))


@router.post("/api/attention/overview")
async def overview(http: HttpRequest, body: AttentionBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: thumbnails(desk, body)))


@router.post("/api/attention/neuron")
async def neuron_view(http: HttpRequest, body: NeuronBody) -> Response:
    def find(desk: Desk) -> dict[str, Any]:
        view = view_of(desk, body)
        scale = scale_of(desk.model, view.name(body.layer))
        parts = inside(desk, view, body.layer, *PARTS)
        return {"tokens": view.columns, **neuron(parts, scale, body.head, body.index)}

    return await reply(http, await ask(http, body.model, find))


@router.post("/api/alignment")
async def alignment(http: HttpRequest, body: AlignmentBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: aligned(desk, body)))


@router.post("/api/rollout")
async def rollout(http: HttpRequest, body: RolloutBody) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: rolled_out(desk, body)))


# --- what is looked at ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """One kind of attention on one text, with some tokens masked."""

    reading: ModelInput
    which: str
    kinds: list[str]  # what `which` may be for this model
    kind: look.Kind  # what the library calls it
    layers: list[str]  # names of the weights
    n_heads: int
    rows: list[dict[str, Any]]
    columns: list[dict[str, Any]]
    edits: dict[str, Edit]
    key: Hashable

    @property
    def n_weights(self) -> int:
        return len(self.layers) * self.n_heads * len(self.rows) * len(self.columns)

    def entering(self, model: Model) -> int:
        """Bytes of what enters all layers."""
        each = (len(self.rows) + len(self.columns)) * model.config.d_model
        return len(self.layers) * each * next(model.parameters()).element_size()

    def name(self, layer: int) -> str:
        """The weights of a layer; ValueError if there is none."""
        if layer >= len(self.layers):
            raise ValueError(f"there is no layer {layer}: this model has 0 to {len(self.layers) - 1}")
        return self.layers[layer]


def view_of(desk: Desk, body: AttentionBody) -> View:
    desk.loaded.require("capture")
    if isinstance(desk.model, ViT):
        raise ValueError(f"{desk.loaded.name} reads images: its attention comes with /api/image/classify")
    words = kinds_of(desk)
    which: str = body.which or ("self" if "self" in words else next(iter(words.keys())))
    if which not in words:
        raise ValueError(f"{desk.loaded.name} has no {which} attention: it has {', '.join(words)}")
    kind, masked = words[which], tuple(sorted(set(body.masked)))
    key = (body.text, body.target, which, masked)
    return desk.keep(("view", key), lambda: _view(desk, body, which, kind, masked, key))


def kinds_of(desk: Desk) -> dict[str, look.Kind]:
    """The page's words for the kinds of attention that a model has, and the library's."""
    has = look.attention_kinds(desk.model)
    if not has:
        raise ValueError(f"{desk.loaded.name} has no attention to look at")
    both = "encoder" in has and "decoder" in has
    return {kind if kind == "cross" or (both and kind == "encoder") else "self": kind for kind in has}


def _view(desk: Desk, body: AttentionBody, which: str, kind: look.Kind, masked: tuple[int, ...], key: Hashable) -> View:
    model = desk.model
    reading = reading_of(desk, body.text, MOST_TOKENS, body.target)
    source, own, _ = sides(desk, reading)
    of_source = bool(source) and kind != "decoder"
    count = len(source if of_source else own)
    if masked and masked[-1] >= count:
        raise ValueError(f"there is no token {masked[-1]} to mask: there are 0 to {count - 1}")
    edits: dict[str, Edit] = {}
    mask = None if desk.tokenizer is None else desk.tokenizer.mask_id
    if masked and isinstance(model, EncoderModel) and mask is not None:
        reading = with_masks(reading, masked, mask)
    elif masked:
        edits = hiding(desk, masked, kind, count)
        if of_source:  # the answer may be another
            with capture(model, edit=edits):
                reading = reading_of(desk, body.text, MOST_TOKENS, body.target, masked)
    source, own, said = sides(desk, reading)
    columns = source if of_source else own
    rows = (said or own) if kind == "cross" else columns
    found = matching_names(list(activation_names(model)), look.name_pattern(model, kind))
    n_heads = int(activation_names(model)[found[0]][1])
    return View(reading, which, list(kinds_of(desk)), kind, found, n_heads, rows, columns, edits, key)


def with_masks(reading: ModelInput, masked: tuple[int, ...], mask: int) -> ModelInput:
    """The same text with [MASK] in some places."""
    ids = [mask if i in masked else id for i, id in enumerate(reading.ids)]
    batch = Batch(torch.tensor([ids], device=reading.batch.ids.device), segments=reading.batch.segments)
    return dataclasses.replace(reading, batch=batch, ids=ids)


def hiding(desk: Desk, masked: tuple[int, ...], kind: look.Kind, count: int) -> dict[str, Edit]:
    """Edits after which no position looks at these, but each at itself."""
    if kind == "cross" and len(masked) == count:
        raise ValueError("every token of the source is masked: leave one to look at")
    patterns = {"decoder.*.self.scores": True}
    if kind != "decoder":  # all that is read of the source
        patterns = {"encoder.*.self.scores": True, "decoder.*.cross.scores": False}
    if "cross" not in look.attention_kinds(desk.model):
        patterns = {f"{kind}.*.self.scores": True}
    known = list(activation_names(desk.model))
    there = {pattern: own for pattern, own in patterns.items() if any(map(_like(pattern), known))}
    return {pattern: _hidden(masked, own) for pattern, own in there.items()}


def _like(pattern: str) -> Callable[[str], bool]:
    return lambda name: fnmatch.fnmatchcase(name, pattern)


def _hidden(columns: tuple[int, ...], own: bool) -> Edit:
    """Scores (B, H, T, S) without these columns; `own`: but for what they say of themselves."""

    def edit(x: Tensor) -> Tensor:
        made, first = x.clone(), x.shape[-1] - x.shape[-2]  # the position of row 0, where keys are cached
        shown = [c for c in columns if c < x.shape[-1]]
        made[..., shown] = -torch.inf
        for c in shown:
            if own and c >= first:
                made[..., c - first, c] = x[..., c - first, c]
        return made

    return edit


# --- maps -------------------------------------------------------------------------------------------------------------


def maps(desk: Desk, view: View, layer: int) -> Tensor:
    """The weights of a layer (H, T, S)."""
    return desk.keep(("map", view.key, layer), lambda: inside(desk, view, layer, "weights")[0])


def inside(desk: Desk, view: View, layer: int, *what: str) -> list[Tensor]:
    """What a layer computes: its queries, keys, scores, weights. The model runs once for all layers of a text."""
    name = view.name(layer)
    whole = view.entering(desk.model) <= ENTERING
    key = ("entered", view.key, None if whole else layer)
    names = view.layers if whole else [name]
    with capture(desk.model, edit=view.edits):
        entered = desk.keep(key, lambda: entering(desk.model, view.reading.batch, names))
        return within(desk.model, entered, name, what)


def of_all(desk: Desk, view: View, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What `make` makes of the weights of each layer (H, T, S), one after the other: (L, ...)."""
    if len(view.layers) == 1:  # a recurrent decoder's weights come step by step
        return make(inside(desk, view, 0, "weights")[0])[None]
    seen, found = passing(make, view.layers)
    with capture(desk.model, edit=view.edits), capture(desk.model, edit=seen):
        entering(desk.model, view.reading.batch, [])
    return torch.stack([found[name] for name in view.layers])


def layer_of(desk: Desk, body: LayerBody) -> dict[str, Any]:
    view = view_of(desk, body)
    return {
        "from": view.rows,
        "to": view.columns,
        "layer": body.layer,
        "n_layers": len(view.layers),
        "n_heads": view.n_heads,
        "which": view.which,
        "kinds": view.kinds,
        "weights": maps(desk, view, body.layer),
        "answer": answer_of(desk, view.reading),
    }


def answer_of(desk: Desk, reading: ModelInput) -> str | None:
    """What an encoder-decoder wrote; None of the others."""
    if reading.batch.source is None:
        return None
    if desk.tokenizer is None:
        return " ".join(map(str, reading.target_ids))
    return desk.tokenizer.target.decode(reading.target_ids)


def thumbnails(desk: Desk, body: AttentionBody) -> dict[str, Any]:
    """Every head of every layer, small: the largest weight in each part of a map, (L, H, side, side), 255 is 1."""
    view = view_of(desk, body)
    side = min(THUMBNAIL, max(len(view.rows), len(view.columns)))
    small = desk.keep(("thumbnails", view.key), lambda: of_all(desk, view, lambda x: shrink(x, side)))
    return {
        "from": view.rows,
        "to": view.columns,
        "n_layers": len(view.layers),
        "n_heads": view.n_heads,
        "which": view.which,
        "kinds": view.kinds,
        "thumbnails": small,
    }


def shrink(weights: Tensor, side: int) -> Tensor:
    """(H, T, S) -> uint8 (H, side, side), 255 is 1."""
    pooled = F.adaptive_max_pool2d(weights, (side, side))
    return (255 * pooled).round().clamp_(0, 255).to(torch.uint8)


def aligned(desk: Desk, body: AlignmentBody) -> dict[str, Any]:
    if "cross" not in look.attention_kinds(desk.model):
        raise ValueError(f"{desk.loaded.name} looks at no source: only encoder-decoders with attention do")
    asked = body.model_dump(include={"model", "target", "masked"})
    view = view_of(desk, AttentionBody(**asked, text=body.source, which="cross"))
    check_bytes(4 * view.n_weights, "an alignment of all layers")
    weights = desk.keep(("alignment", view.key), lambda: of_all(desk, view, lambda x: x))  # (L, H, T, S)
    text = answer_of(desk, view.reading)
    return {"source": view.columns, "target": view.rows, "weights": weights, "text": text}


def rolled_out(desk: Desk, body: RolloutBody) -> dict[str, Any]:
    """How much of each input has come to each position by each layer: (L, T, T); of an image, to [CLS] (L, rows,
    columns)."""
    if (body.text is None) == (body.image is None):
        raise ValueError("give either a text or an image")
    if body.image is not None:
        if body.masked or body.target is not None:
            raise ValueError("an image has no tokens to mask, and no target: give a text with them")
        grid, weights = attended(desk.model, body.image)
        return {"grid": grid, "weights": over_image(weights, grid)}
    asked = body.model_dump(include={"model", "text", "target", "which", "masked"})
    view = view_of(desk, AttentionBody(**asked))
    check_bytes(4 * view.n_weights // view.n_heads, "a rollout")

    def make() -> Tensor:
        means = of_all(desk, view, lambda x: x.mean(dim=0, keepdim=True))  # (L, 1, T, T)
        return look.rollout(means)  # which begins with the mean of the heads

    return {"tokens": view.rows, "weights": desk.keep(("rollout", view.key), make)}
