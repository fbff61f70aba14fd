"""GET /api/models: what each served model is, from its config; no weights are read."""

from __future__ import annotations

import asyncio
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.models.base import DecoderModel, EncoderDecoderModel, Model
from heedful.models.image_gpt import ImageGPT
from heedful.models.registry import FAMILIES
from heedful.models.seq2seq import Seq2Seq
from heedful.models.vit import ViT
from heedful.serve.playground.attention_view import AttentionKind, attention_layers
from heedful.serve.playground.purpose import Purpose, model_purpose, strengths
from heedful.serve.playground.wire import PlaygroundModel, encode_response
from heedful.text import Tokenizer, unknown_share
from heedful.weights.catalog import CatalogEntry, catalog, pulled_models
from heedful.weights.describe import load_tokenizer
from heedful.weights.meta import load_meta
from heedful.zoo import FOLDER, cards, read_card

router = APIRouter()
EXAMPLES: dict[str, str] = {  # by kind
    "decoder": "Once upon a time",
    "encoder": "The cat sat on the mat because it was tired.",
    "encoder-decoder": "Ein Hund läuft über die Straße.",
    "recurrent": "3 1 4 1 5 9 2 6",
}
GREY_LEVELS = 256  # of a pixel that a model takes as a number

ModelKind = Literal["decoder", "encoder", "encoder-decoder", "recurrent", "image-classifier", "image-decoder"]
KINDS: tuple[tuple[type[Model], ModelKind], ...] = (
    (ViT, "image-classifier"),
    (ImageGPT, "image-decoder"),
    (Seq2Seq, "recurrent"),
    (EncoderDecoderModel, "encoder-decoder"),
    (DecoderModel, "decoder"),
)


class ImageFormat(PlaygroundModel):
    """The images that a model reads."""

    size: int = Field(description="Pixels of each side")
    channels: int
    levels: int


class TellingHead(PlaygroundModel):
    """A head that shows at a glance what attention does, from the model's card."""

    layer: int
    head: int


class ModelDescription(PlaygroundModel):
    """What is known of a served model from its files."""

    id: str
    family: str
    about: str
    purpose: Purpose = Field(description="What it is for first of all")
    good_at: str
    fails_at: str
    source: str = Field(description="What heedful.load finds it by, where the server was started")
    run: str | None = Field(description="The name of the run that it is a checkpoint of")
    score: str = Field(description="The first score of its card; empty if it has none")
    kind: ModelKind
    abilities: list[str]
    reads: Literal["text", "numbers", "image"] = Field(description="numbers: token ids, since it has no tokenizer")
    parameters: int
    n_layers: int
    attention_layers: dict[AttentionKind, int] = Field(description="Layers with each kind of attention")
    n_heads: int
    example: str = Field(description="A short text without a token that is unknown to it; empty if it reads no text")
    context: int | None
    vocabulary: int | None
    chat: bool
    image: ImageFormat | None
    labels: list[str] | None
    telling: TellingHead | None
    loaded: bool


class PullableModel(PlaygroundModel):
    """A model that is not on the server's machine, and the command that fetches it."""

    name: str
    about: str
    purpose: Purpose
    good_at: str
    fails_at: str
    parameters: int
    bytes: int = Field(description="The size of the download")
    licence: str
    command: str


class ModelsResponse(PlaygroundModel):
    """All served models, and those that can be had."""

    models: list[ModelDescription]
    pullable: list[PullableModel]


@router.get("/api/models", response_model=ModelsResponse)
async def get_models(http: HttpRequest) -> Response:
    """All served models, described."""
    manager = http.app.state.manager
    await manager.refresh_runs()

    def describe_all() -> list[dict[str, Any]]:
        found = []
        for name in manager.names:
            info = manager.info(name)
            described = model_description(manager.path(name), info.created)
            run = manager.run_of(name)
            told = {"about": f"trained on this machine, the run {run}"} if run is not None else {}
            own = {"id": name, "source": manager.source(name), "run": run, "context": info.context_length}
            found.append({**described, **own, **told, "loaded": info.loaded})
        return found

    models, here = await asyncio.to_thread(describe_all), pulled_models()
    others = [pullable_model(entry) for name, entry in catalog().items() if name not in here]
    return await encode_response(http, {"models": models, "pullable": others})


def pullable_model(entry: CatalogEntry) -> dict[str, Any]:
    """A PullableModel."""
    keys = ("name", "about", "purpose", "good_at", "fails_at", "parameters", "bytes", "licence")
    told = {key: getattr(entry, key) for key in keys}
    return {**told, "command": f"heedful pull {entry.name}"}


@lru_cache(maxsize=256)
def model_description(path: Path, written: int) -> dict[str, Any]:
    """A ModelDescription without id and state; `written`, the time of its files, is there for the cache alone."""
    model = load_meta(path)
    config, labels = model.config, getattr(model.config, "labels", ())
    tokenizer, kind = _tokenizer(path), model_kind(model)
    reads = "numbers" if tokenizer is None else "text"
    card, score, telling = None, "", None
    if path.parent == FOLDER and path.name in cards():
        card, score = cards()[path.name], read_card(path).score
        named = read_card(path).metadata.get("attention")
        telling = named and {"layer": named["layer"], "head": named["head"]}
    if path in pulled_models().values() and path.stem in catalog():
        card = catalog()[path.stem].about
    if isinstance(model, ViT | ImageGPT):
        reads = "image"
    chats = tokenizer is not None and tokenizer.chat_template is not None
    purpose = model_purpose(model, chats)
    good_at, fails_at = strengths(path, purpose)
    return {
        "family": model.family,
        "about": card or FAMILIES[model.family].about,
        "purpose": purpose,
        "good_at": good_at,
        "fails_at": fails_at,
        "score": score,
        "kind": kind,
        "abilities": list(model.abilities),
        "reads": reads,
        "parameters": model.n_parameters(),
        "n_layers": getattr(config, "n_layers", 0),
        "attention_layers": attention_layers(model),
        "n_heads": attention_heads(model),
        "example": example_text(tokenizer, kind) if tokenizer is not None and reads == "text" else "",
        "vocabulary": getattr(config, "vocab_size", None),
        "chat": chats,
        "image": image_format(model),
        "labels": list(labels) if labels and {"classify", "tag"} & set(model.abilities) else None,
        "telling": telling,
    }


def model_kind(model: Model) -> ModelKind:
    """The kind of architecture."""
    return next((kind for family, kind in KINDS if isinstance(model, family)), "encoder")


def attention_heads(model: Model) -> int:
    """Attention heads of a layer: a recurrent model has one, or none."""
    if isinstance(model, Seq2Seq):
        return int(model.config.attention != "none")
    return int(getattr(model.config, "n_heads", 0))


def image_format(model: Model) -> dict[str, int] | None:
    """The ImageFormat of a model that reads images."""
    if isinstance(model, ViT):
        # The page draws squares, whose sides are multiples of both of a patch's.
        step = math.lcm(*model.config.patch)
        size = -(-max(model.config.image) // step) * step
        return {"size": size, "channels": model.config.n_channels, "levels": GREY_LEVELS}
    if isinstance(model, ImageGPT):
        try:
            channels = model.palette.shape[1]
        except ValueError:  # the palette is not in its files: it can complete no image
            channels = 1
        return {"size": model.image_shape[0], "channels": channels, "levels": model.config.vocab_size - 1}
    return None


def example_text(tokenizer: Tokenizer, kind: ModelKind) -> str:
    """A text that a model of this kind may be tried with: a usual one, or else the first tokens of its vocabulary."""
    usual = (EXAMPLES.get(kind, ""), *EXAMPLES.values())
    readable = (text for text in usual if text and unknown_share(tokenizer, text) == 0)
    return next(readable, "") or tokenizer.decode(list(range(min(len(tokenizer), 24))), skip_special=True).strip()


def _tokenizer(path: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(str(path))
    except ValueError:
        return None
