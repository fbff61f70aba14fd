"""POST /api/steps: every number of a forward pass, from a text to the next token, of a model small enough to be read.

What hooks do not see is computed again from what they do, with the model's own modules: the sums on the residual
stream, the products before the scale, what enters the activation. Whatever the family has not (a norm in another
place, added positions) is null.

    T tokens, E width, H heads, D head size, F hidden width, V vocabulary
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import tokenizers
import torch
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from heedful.models.base import DecoderModel
from heedful.models.image_gpt import ImageGPT
from heedful.nn.block import Block
from heedful.nn.feedforward import FeedForward
from heedful.observe.capture import Activations, capture
from heedful.observe.table import names
from heedful.serve.playground.desk import Desk, ask
from heedful.serve.playground.shapes import OfText, check_count, reply
from heedful.serve.playground.text import cut, reading_of
from heedful.text.tokenizer import Tokenizer

router = APIRouter()
MOST_LAYERS, MOST_TOKENS, WIDEST, LARGEST = 4, 64, 128, 10_000


@router.post("/api/steps")
async def steps(http: HttpRequest, body: OfText) -> Response:
    return await reply(await ask(http, body.model, lambda desk: every_step(desk, body.text)))


def check_small(desk: Desk) -> DecoderModel:
    """ValueError for a model that nobody could read every number of."""
    model = desk.model
    if not isinstance(model, DecoderModel) or isinstance(model, ImageGPT):
        raise ValueError(f"{desk.loaded.name} does not go on with a text: choose a decoder, as tiny")
    config = model.config
    if config.n_layers > MOST_LAYERS or config.d_model > WIDEST or config.vocab_size > LARGEST:
        raise ValueError(
            f"{desk.loaded.name} is too large to show every number ({config.n_layers} layers, {config.d_model} wide, "
            f"{config.vocab_size} tokens): at most {MOST_LAYERS} layers, {WIDEST} wide, {LARGEST} tokens; tiny is small"
        )
    return model


def every_step(desk: Desk, text: str) -> dict[str, Any]:
    model = check_small(desk)
    check_count(desk, len(cut(desk, text)), MOST_TOKENS)
    return desk.keep(("steps", text), lambda: _steps(desk, model, text))


def _steps(desk: Desk, model: DecoderModel, text: str) -> dict[str, Any]:
    reading = reading_of(desk, text)
    kinds = ("embeddings", "positions", "before", "after", "output", "hidden")
    watched = ("queries", "keys", "values", "scores", "weights", "heads")
    places = [name for name in names(model) if name.split(".")[-1] in (*kinds, *watched)]
    with capture(model, [*places, "logits"]) as acts:
        model(reading.batch)
    added = acts["decoder.positions"][0] if "decoder.positions" in acts else None
    blocks = [block for block in model.decoder.blocks if isinstance(block, Block)]
    logits = acts["logits"][0, -1].float()
    return {
        "tokens": desk.tokens(reading.ids),
        "merges": None if desk.tokenizer is None else merges(desk.tokenizer, text),
        "embeddings": acts["decoder.embeddings"][0],
        "positions": added,
        "layers": [one_layer(block, acts, f"decoder.{i}") for i, block in enumerate(blocks)],
        "final": acts["decoder.output"][0],
        "logits": logits.tolist(),
        "vocabulary": desk.tokens(list(range(len(logits)))),
    }


def one_layer(block: Block, acts: Activations, base: str) -> dict[str, Any]:
    """All that happens in a block, in order; of one that norms after the sum, the sums are the normed ones."""
    part = block.attention
    x, y = acts[f"{base}.before"], acts[f"{base}.self.output"]  # (1, T, E)
    q, k, v = (acts[f"{base}.self.{what}"][0] for what in ("queries", "keys", "values"))
    shared = k.repeat_interleave(len(q) // len(k), dim=0)  # (H, T, D), also where heads share keys
    raw = q @ shared.transpose(-2, -1)  # (H, T, T)
    scale = 1 / math.sqrt(part.d_head) if part.scale is None else part.scale
    heads = acts[f"{base}.self.heads"][0]
    before = block.residual != "post"
    normed = _normed(block.attention_norm, x) if before else None
    after = y if block.attention_after is None else block.attention_after(y)
    parallel = block.residual == "parallel"
    residual = None if parallel else x + after if before else _normed(block.attention_norm, x + after)
    enters = x if residual is None else residual
    normed2 = _normed(block.feedforward_norm, enters) if before else None
    thinks = enters if normed2 is None else normed2
    if parallel and block.feedforward_norm is None and normed is not None:
        thinks = normed
    return {
        "residual_style": block.residual,
        "input": x[0],
        "normed": _first(normed),
        "q": q,
        "k": k,
        "v": v,
        "scores": raw,
        "scale": scale,
        "scaled": raw * scale,
        "masked": acts[f"{base}.self.scores"][0],
        "weights": acts[f"{base}.self.weights"][0],
        "heads_out": heads,
        "concatenated": heads.transpose(0, 1).flatten(1),
        "attention_out": y[0],
        "residual": _first(residual),
        "normed2": _first(normed2),
        "hidden": _first(before_activation(block.feedforward, thinks)),
        "activated": acts[f"{base}.feedforward.hidden"][0] if f"{base}.feedforward.hidden" in acts else None,
        "feedforward_out": acts[f"{base}.feedforward.output"][0],
        "output": acts[f"{base}.after"][0],
    }


def _normed(norm: torch.nn.Module | None, x: Tensor) -> Tensor | None:
    return None if norm is None else norm(x)


def _first(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[0]


def before_activation(network: torch.nn.Module, x: Tensor) -> Tensor | None:
    """What enters the activation (1, T, F), of a gated network the gate; None of a mixture of experts."""
    if not isinstance(network, FeedForward):
        return None
    if network.joint is not None:
        first: Tensor = network.joint(x).chunk(2, dim=-1)[0]
        return first
    out: Tensor = (network.up if network.gate is None else network.gate)(x)
    return out


# --- tokens and merges ------------------------------------------------------------------------------------------------


def merges(tokenizer: Tokenizer, text: str) -> list[dict[str, Any]] | None:
    """How byte pair encoding made the tokens: each word, and its pieces after every merge. None of other tokenizers."""
    backend = tokenizer.backend
    if not isinstance(backend.model, tokenizers.models.BPE) or backend.pre_tokenizer is None:
        return None
    pairs = [tuple(p) if isinstance(p, list) else tuple(p.split(" ", 1)) for p in _pairs(backend)]
    rank = {pair: i for i, pair in enumerate(pairs)}
    if not rank:
        return None
    plain = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(plain)]
    return [{"word": word, "steps": _merged(list(word), rank)} for word in words]


def _pairs(backend: tokenizers.Tokenizer) -> list[Any]:
    found: list[Any] = json.loads(backend.to_str())["model"].get("merges") or []
    return found


def _merged(pieces: list[str], rank: dict[tuple[str, ...], int]) -> list[list[str]]:
    """The pieces at first, and after each merge of the pair that was learned first (Sennrich et al. 2016)."""
    found = [pieces]
    while True:
        pairs = [pair for pair in itertools.pairwise(pieces) if pair in rank]
        if not pairs:
            return found
        best = min(pairs, key=rank.__getitem__)
        joined, i = list[str](), 0
        while i < len(pieces):
            if tuple(pieces[i : i + 2]) == best:
                joined.append(best[0] + best[1])
                i += 2
            else:
                joined.append(pieces[i])
                i += 1
        pieces = joined
        found.append(pieces)
