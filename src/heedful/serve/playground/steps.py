"""POST /api/steps: every number of a forward pass, from a text to the next token, of a model small enough to be read;
and POST /api/steps/weights: what it has learned, of which those numbers were made.

What hooks do not see is computed again from what they do, with the model's own modules: the sums on the residual
stream, the products before the scale, what enters the activation. Whatever the family has not (a norm in another
place, added positions) is null.

    T tokens, E width, H heads, D head size, R rotated part of D, F hidden width, V vocabulary, X experts
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
from heedful.nn.attention import Attention
from heedful.nn.block import Block
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.norm import RMSNorm
from heedful.observe.capture import Activations, capture
from heedful.observe.names import activation_names
from heedful.serve.playground.desk import Desk, ask
from heedful.serve.playground.matrices import experts, hidden, learned, projections
from heedful.serve.playground.shapes import Name, OfText, check_count, reply
from heedful.serve.playground.text import cut, reading_of
from heedful.serve.request_schema import RequestBody
from heedful.text.tokenizer import Tokenizer

router = APIRouter()
MOST_LAYERS, MOST_TOKENS, WIDEST, LARGEST = 4, 64, 128, 10_000


class OfModel(RequestBody):
    model: Name


@router.post("/api/steps")
async def steps(http: HttpRequest, body: OfText) -> Response:
    return await reply(http, await ask(http, body.model, lambda desk: every_step(desk, body.text)))


@router.post("/api/steps/weights")
async def weights(http: HttpRequest, body: OfModel) -> Response:
    return await reply(http, await ask(http, body.model, every_weight))


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


def every_weight(desk: Desk) -> dict[str, Any]:
    """Not kept: the page asks once for each model, and would push out what is asked for often."""
    return learned(check_small(desk), MOST_TOKENS)


def _steps(desk: Desk, model: DecoderModel, text: str) -> dict[str, Any]:
    reading = reading_of(desk, text)
    kinds = ("embeddings", "positions", "before", "after", "output", "hidden")
    watched = ("queries", "keys", "values", "scores", "weights", "heads")
    places = [name for name in activation_names(model) if name.split(".")[-1] in (*kinds, *watched)]
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
        "rotation": rotation(model, len(reading.ids)),
        "layers": [one_layer(block, acts, f"decoder.{i}") for i, block in enumerate(blocks)],
        "final": acts["decoder.output"][0],
        "logits": logits.tolist(),
        "vocabulary": desk.tokens(list(range(len(logits)))),
    }


def rotation(model: DecoderModel, n: int) -> dict[str, Any] | None:
    """By which angles queries and keys are turned at each place: their cosines and sines (T, R/2)."""
    rotary = model.decoder.rotary
    if rotary is None:
        return None
    found = rotary(torch.arange(n, device=model.device)[None], n)
    return {"cos": found.cos[0, 0], "sin": found.sin[0, 0], "layout": found.layout}


def one_layer(block: Block, acts: Activations, base: str) -> dict[str, Any]:
    """All that happens in a block, in order, each (T, ...) or of every head (H, T, ...)."""
    x, y = acts[f"{base}.before"][0], acts[f"{base}.self.output"][0]  # (T, E)
    pre, parallel = block.residual != "post", block.residual == "parallel"
    normed = _normed(block.attention_norm, x) if pre else None
    after = _normed(block.attention_after, y)
    summed = None if parallel else x + (y if after is None else after)
    residual = summed if pre or summed is None else _normed(block.attention_norm, summed)
    enters = x if residual is None else residual
    normed2 = _normed(block.feedforward_norm, enters) if pre else None
    thinks = enters if normed2 is None else normed2
    if parallel and normed2 is None and normed is not None:
        thinks = normed
    z = acts[f"{base}.feedforward.output"][0]
    after2 = _normed(block.feedforward_after, z)
    summed2 = None if pre else enters + (z if after2 is None else after2)
    return {
        "residual_style": block.residual,
        "input": x,
        "normed": normed,
        **attention_of(block.attention, acts, base, x if normed is None else normed),
        "attention_out": y,
        "attention_after": after,
        "summed": None if pre else summed,
        "residual": residual,
        "normed2": normed2,
        **thought_of(block.feedforward, acts, base, thinks),
        "feedforward_out": z,
        "feedforward_after": after2,
        "summed2": summed2,
        "output": acts[f"{base}.after"][0],
    }


def attention_of(part: Attention, acts: Activations, base: str, x: Tensor) -> dict[str, Any]:
    """From what attention reads, x (T, E), to what its heads bring back. `q_raw` and `k_raw` are the products, before
    norms and rotation."""
    q, k, v = (acts[f"{base}.self.{what}"][0] for what in ("queries", "keys", "values"))
    shared = k.repeat_interleave(len(q) // len(k), dim=0)  # (H, T, D), also where heads share keys
    scores = q @ shared.transpose(-2, -1)  # (H, T, T)
    scale = 1 / math.sqrt(part.d_head) if part.scale is None else part.scale
    heads = acts[f"{base}.self.heads"][0]
    query, key, _ = projections(part, x)
    return {
        "q_raw": _by_head(query, part.d_head),
        "k_raw": _by_head(key, part.d_head),
        "q_normed": _normed_heads(part.query_norm, query, part.d_head),
        "k_normed": _normed_heads(part.key_norm, key, part.d_head),
        "q": q,
        "k": k,
        "v": v,
        "scores": scores,
        "scale": scale,
        "scaled": scores * scale,
        "softcap": part.softcap,
        "masked": acts[f"{base}.self.scores"][0],
        "weights": acts[f"{base}.self.weights"][0],
        "heads_out": heads,
        "concatenated": heads.transpose(0, 1).flatten(1),
    }


def thought_of(network: torch.nn.Module, acts: Activations, base: str, x: Tensor) -> dict[str, Any]:
    """What a feed-forward network makes of x (T, E) before its last product, or what each of its experts says."""
    found: dict[str, Any] = dict.fromkeys(("hidden", "gated", "activated", "shares", "answers"))
    if isinstance(network, MixtureOfExperts):
        found["shares"], found["answers"] = experts(network, x)
    elif isinstance(network, FeedForward):
        found["hidden"], found["gated"] = hidden(network, x)
        found["activated"] = acts[f"{base}.feedforward.hidden"][0]
    return found


def _normed(norm: torch.nn.Module | None, x: Tensor) -> Tensor | None:
    return None if norm is None else norm(x)


def _by_head(x: Tensor, d_head: int) -> Tensor:
    return x.unflatten(-1, (-1, d_head)).transpose(0, 1)  # (T, H·D) -> (H, T, D)


def _normed_heads(norm: RMSNorm | None, x: Tensor, d_head: int) -> Tensor | None:
    """A norm of the head's size acts on each head (Qwen 3), a wider one on all of them (OLMo 2)."""
    if norm is None:
        return None
    found: Tensor = norm(_by_head(x, d_head)) if len(norm.weight) == d_head else _by_head(norm(x), d_head)
    return found


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
