"""GET /api/models: what each served model is, by its config; no weights are read."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.models.base import DecoderModel, EncoderDecoderModel, Model
from heedful.models.image_gpt import ImageGPT
from heedful.models.registry import FAMILIES
from heedful.models.seq2seq import Seq2Seq
from heedful.models.vit import ViT
from heedful.serve.playground.shapes import reply
from heedful.weights.describe import load_tokenizer
from heedful.weights.meta import load_meta
from heedful.zoo import FOLDER, cards

router = APIRouter()
GREYS = 256  # levels of a pixel that a model takes as a number


@router.get("/api/models")
async def list_models(http: HttpRequest) -> Response:
    manager = http.app.state.manager

    def describe_all() -> list[dict[str, Any]]:
        found = []
        for name in manager.names:
            info = manager.info(name)
            found.append({"id": name, **describe(manager.path(name), info.created), "loaded": info.loaded})
        return found

    return await reply(http, {"models": await asyncio.to_thread(describe_all)})


@lru_cache(maxsize=256)
def describe(path: Path, written: int) -> dict[str, Any]:
    """What is known of a model without its weights; `written` is when, so that a new one is described anew."""
    model = load_meta(path)
    config, labels = model.config, getattr(model.config, "labels", ())
    chats, reads = _tokenizer(path)
    card = cards().get(path.name) if path.parent == FOLDER else None
    if isinstance(model, ViT | ImageGPT):
        reads = "image"
    return {
        "family": model.family,
        "about": card or FAMILIES[model.family].about,
        "kind": kind_of(model),
        "abilities": list(model.abilities),
        "reads": reads,
        "parameters": model.n_parameters(),
        "n_layers": getattr(config, "n_layers", 0),
        "n_heads": n_heads(model),
        "context": model.longest,
        "vocabulary": getattr(config, "vocab_size", None),
        "chat": chats,
        "image": image_of(model),
        "labels": list(labels) if labels and {"classify", "tag"} & set(model.abilities) else None,
    }


def kind_of(model: Model) -> str:
    kinds = (
        (ViT, "image-classifier"),
        (ImageGPT, "image-decoder"),
        (Seq2Seq, "recurrent"),
        (EncoderDecoderModel, "encoder-decoder"),
        (DecoderModel, "decoder"),
    )
    return next((kind for family, kind in kinds if isinstance(model, family)), "encoder")


def n_heads(model: Model) -> int:
    """Of attention: a recurrent model has one, or none."""
    if isinstance(model, Seq2Seq):
        return int(model.config.attention != "none")
    return int(getattr(model.config, "n_heads", 0))


def image_of(model: Model) -> dict[str, int] | None:
    if isinstance(model, ViT):
        return {"size": model.config.image_size, "channels": model.config.n_channels, "levels": GREYS}
    if isinstance(model, ImageGPT):
        side = round(model.config.max_len**0.5)
        return {"size": side, "channels": 1, "levels": model.config.vocab_size - 1}
    return None


def _tokenizer(path: Path) -> tuple[bool, str]:
    """Whether it can chat, and what it reads: text, or without a tokenizer the numbers of tokens."""
    try:
        return load_tokenizer(str(path)).chat_template is not None, "text"
    except ValueError:
        return False, "numbers"
