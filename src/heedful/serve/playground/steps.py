"""POST /api/steps: every activation of a forward pass of a small model, from a text to the next token; and
POST /api/steps/weights: its learned parameters.

What hooks do not see is recomputed from what they see with the model's own modules: the sums on the residual stream,
the products before the scale, the input of the activation. What the family does not have (a norm in some place, added
positions) is null.

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
from heedful.nn.block import Block, ParallelBlock, PostNormBlock
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.norm import RMSNorm
from heedful.observe.capture import Activations, capture
from heedful.observe.names import activation_names
from heedful.serve.playground.inspection import Inspector, run_on_model
from heedful.serve.playground.parameters import (
    expert_outputs,
    feedforward_hidden,
    learned_parameters,
    qkv_projections,
)
from heedful.serve.playground.steps_schema import ParametersResponse, StepsResponse
from heedful.serve.playground.text import model_input, tokens_of
from heedful.serve.playground.wire import (
    ARRAYS_RESPONSE,
    ModelName,
    TextRequest,
    check_token_count,
    encode_response,
)
from heedful.serve.request_schema import RequestBody
from heedful.text.tokenizer import Tokenizer

router = APIRouter()
MAX_LAYERS, MAX_STEP_TOKENS, MAX_WIDTH, MAX_VOCABULARY = 4, 64, 128, 10_000
OUTPUTS = ("embeddings", "positions", "before", "after", "output", "hidden")  # last parts of the names of activations
INSIDE = ("queries", "keys", "values", "scores", "weights", "heads")


class ParametersRequest(RequestBody):
    """A model."""

    model: ModelName


@router.post("/api/steps", response_model=StepsResponse, responses=ARRAYS_RESPONSE)
async def post_steps(http: HttpRequest, body: TextRequest) -> Response:
    """Every activation of a forward pass of a small decoder."""
    return await encode_response(http, await run_on_model(http, body.model, lambda i: forward_steps(i, body.text)))


@router.post("/api/steps/weights", response_model=ParametersResponse, responses=ARRAYS_RESPONSE)
async def post_steps_weights(http: HttpRequest, body: ParametersRequest) -> Response:
    """The learned parameters of a small decoder."""
    return await encode_response(http, await run_on_model(http, body.model, all_parameters))


def small_decoder(inspector: Inspector) -> DecoderModel:
    """The model; ValueError if it is no decoder of text or too large to show every number."""
    model = inspector.model
    generates = "generate" in model.abilities
    if not (isinstance(model, DecoderModel) and generates) or isinstance(model, ImageGPT):
        raise ValueError(f"{inspector.loaded.name} does not go on with a text: choose a decoder, as tiny")
    config = model.config
    if not is_small(model):
        raise ValueError(
            f"{inspector.loaded.name} is too large to show every number ({config.n_layers} layers, {config.d_model} "
            f"wide, {config.vocab_size} tokens): at most {MAX_LAYERS} layers, {MAX_WIDTH} wide, {MAX_VOCABULARY} "
            "tokens; tiny is small"
        )
    return model


def is_small(model: DecoderModel) -> bool:
    """Whether every number of a pass can be shown."""
    config = model.config
    return config.n_layers <= MAX_LAYERS and config.d_model <= MAX_WIDTH and config.vocab_size <= MAX_VOCABULARY


def forward_steps(inspector: Inspector, text: str) -> dict[str, Any]:
    """A StepsResponse, cached."""
    model = small_decoder(inspector)
    check_token_count(inspector, len(tokens_of(inspector, text)), MAX_STEP_TOKENS)
    return inspector.cached(("steps", text), lambda: _forward_steps(inspector, model, text))


def all_parameters(inspector: Inspector) -> dict[str, Any]:
    """A ParametersResponse. Not cached: the page asks once for a model, and it would evict what is asked for often."""
    return learned_parameters(small_decoder(inspector), MAX_STEP_TOKENS)


def _forward_steps(inspector: Inspector, model: DecoderModel, text: str) -> dict[str, Any]:
    inputs = model_input(inspector, text)
    places = [name for name in activation_names(model) if name.split(".")[-1] in (*OUTPUTS, *INSIDE)]
    with capture(model, [*places, "logits"]) as acts:
        model(inputs.batch)
    added = acts["decoder.positions"][0] if "decoder.positions" in acts else None
    blocks = [block for block in model.decoder.blocks if isinstance(block, Block)]
    logits = acts["logits"][0, -1].float()
    return {
        "tokens": inspector.tokens(inputs.ids),
        "merges": None if inspector.tokenizer is None else bpe_merges(inspector.tokenizer, text),
        "embeddings": acts["decoder.embeddings"][0],
        "positions": added,
        "rotation": rotary_angles(model, len(inputs.ids)),
        "layers": [block_steps(block, acts, f"decoder.{i}") for i, block in enumerate(blocks)],
        "final": acts["decoder.output"][0],
        "logits": logits.tolist(),
        "vocabulary": inspector.tokens(list(range(len(logits)))),
    }


def rotary_angles(model: DecoderModel, n: int) -> dict[str, Any] | None:
    """The rotary embedding of each position: cosines and sines of its angles (T, R/2)."""
    rotary = model.decoder.rotary
    if rotary is None:
        return None
    found = rotary(torch.arange(n, device=model.device)[None], n)
    return {"cos": found.cos[0, 0], "sin": found.sin[0, 0], "layout": found.layout}


def block_steps(block: Block, acts: Activations, base: str) -> dict[str, Any]:
    """A LayerSteps: the activations of a block in order, each (T, ...) or by head (H, T, ...)."""
    x, y = acts[f"{base}.before"][0], acts[f"{base}.self.output"][0]  # (T, E)
    pre, parallel = not isinstance(block, PostNormBlock), isinstance(block, ParallelBlock)
    normed = _normed(block.attention_norm, x) if pre else None
    after = _normed(block.attention_after, y)
    summed = None if parallel else x + (y if after is None else after)
    residual = summed if pre or summed is None else _normed(block.attention_norm, summed)
    stream = x if residual is None else residual
    normed2 = _normed(block.feedforward_norm, stream) if pre else None
    feedforward_input = stream if normed2 is None else normed2
    if parallel and normed2 is None and normed is not None:
        feedforward_input = normed
    z = acts[f"{base}.feedforward.output"][0]
    after2 = _normed(block.feedforward_after, z)
    summed2 = None if pre else stream + (z if after2 is None else after2)
    return {
        "residual_style": "parallel" if parallel else "pre" if pre else "post",
        "input": x,
        "normed": normed,
        **attention_steps(block.attention, acts, base, x if normed is None else normed),
        "attention_out": y,
        "attention_after": after,
        "summed": None if pre else summed,
        "residual": residual,
        "normed2": normed2,
        **feedforward_steps(block.feedforward, acts, base, feedforward_input),
        "feedforward_out": z,
        "feedforward_after": after2,
        "summed2": summed2,
        "output": acts[f"{base}.after"][0],
    }


def attention_steps(part: Attention, acts: Activations, base: str, x: Tensor) -> dict[str, Any]:
    """From the input of attention, x (T, E), to the outputs of its heads. `q_raw` and `k_raw` are the projections,
    before norms and rotation."""
    q, k, v = (acts[f"{base}.self.{what}"][0] for what in ("queries", "keys", "values"))
    shared = k.repeat_interleave(len(q) // len(k), dim=0)  # (H, T, D), also where heads share keys
    scores = q @ shared.transpose(-2, -1)  # (H, T, T)
    scale = 1 / math.sqrt(part.d_head) if part.scale is None else part.scale
    heads = acts[f"{base}.self.heads"][0]
    query, key, _ = qkv_projections(part, x)
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


def feedforward_steps(network: torch.nn.Module, acts: Activations, base: str, x: Tensor) -> dict[str, Any]:
    """The hidden activations of a feed-forward network on x (T, E), or the outputs of its experts."""
    found: dict[str, Any] = dict.fromkeys(("hidden", "gated", "activated", "shares", "answers"))
    if isinstance(network, MixtureOfExperts):
        found["shares"], found["answers"] = expert_outputs(network, x)
    elif isinstance(network, FeedForward):
        found["hidden"], found["gated"] = feedforward_hidden(network, x)
        found["activated"] = acts[f"{base}.feedforward.hidden"][0]
    return found


def _normed(norm: torch.nn.Module | None, x: Tensor) -> Tensor | None:
    return None if norm is None or isinstance(norm, torch.nn.Identity) else norm(x)


def _by_head(x: Tensor, d_head: int) -> Tensor:
    return x.unflatten(-1, (-1, d_head)).transpose(0, 1)  # (T, H·D) -> (H, T, D)


def _normed_heads(norm: RMSNorm | None, x: Tensor, d_head: int) -> Tensor | None:
    """A norm of the head's size acts on each head (Qwen 3), a wider one on all of them (OLMo 2)."""
    if norm is None:
        return None
    found: Tensor = norm(_by_head(x, d_head)) if len(norm.weight) == d_head else _by_head(norm(x), d_head)
    return found


# --- tokens and merges ------------------------------------------------------------------------------------------------


def bpe_merges(tokenizer: Tokenizer, text: str) -> list[dict[str, Any]] | None:
    """Byte pair encoding step by step: each word, and its pieces after every merge. None for other tokenizers."""
    backend = tokenizer.backend
    if not isinstance(backend.model, tokenizers.models.BPE) or backend.pre_tokenizer is None:
        return None
    pairs = [tuple(p) if isinstance(p, list) else tuple(p.split(" ", 1)) for p in _pairs(backend)]
    rank = {pair: i for i, pair in enumerate(pairs)}
    if not rank:
        return None
    plain = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(plain)]
    return [{"word": word, "steps": _merge_steps(list(word), rank)} for word in words]


def _pairs(backend: tokenizers.Tokenizer) -> list[Any]:
    found: list[Any] = json.loads(backend.to_str())["model"].get("merges") or []
    return found


def _merge_steps(pieces: list[str], rank: dict[tuple[str, ...], int]) -> list[list[str]]:
    """The pieces at first, and after each merge: always of the pair learned first (Sennrich et al. 2016)."""
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
