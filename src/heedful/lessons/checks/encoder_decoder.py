"""The exercises of *Encoder, decoder, cross-attention*."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_cross_attention(answer: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """Queries of the decoder, keys and values of the encoder, no mask."""
    w_q, w_k, w_v = (torch.randn(6, 4) for _ in range(3))
    x, memory = torch.randn(3, 6), torch.randn(5, 6)

    def attended(q_from: Tensor, k_from: Tensor, v_from: Tensor, scale: float = 2.0, dim: int = -1) -> Tensor:
        return ((q_from @ w_q) @ (k_from @ w_k).T / scale).softmax(dim=dim) @ (v_from @ w_v)

    got = require_tensor(answer(x, memory, w_q, w_k, w_v), (3, 4))
    wrong = {
        "the keys and values are the decoder's: they must be made of the memory": attended(x, x, x),
        "the scores are not divided by √D": attended(x, memory, memory, scale=1.0),
        "the scores are divided by the root of the model's width E, not of D": attended(x, memory, memory, 6**0.5),
        "the softmax runs over the queries: it must run over the keys, the last axis": attended(
            x, memory, memory, dim=0
        ),
        "keys and values are swapped": ((x @ w_q) @ (memory @ w_v).T / 2).softmax(dim=-1) @ (memory @ w_k),
    }
    for message, other in wrong.items():
        require(not torch.allclose(got, other, atol=1e-4), message)
    scores = (x @ w_q) @ (memory @ w_k).T / math.sqrt(4)
    future = torch.ones(3, 5, dtype=torch.bool).triu(diagonal=1)
    causal = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ (memory @ w_v)
    require(not torch.allclose(got, causal, atol=1e-4), "no causal mask here: the whole source may be looked at")
    require_close(got, attended(x, memory, memory), "a number is wrong")


def check_transformer_parameters(answer: Callable[[int, int, int, int], int]) -> None:
    """The count of the base model's kind, with what is usually forgotten."""
    d, d_ff, n, v = 12, 40, 3, 100
    attention, feedforward, norm, embedding = 4 * (d * d + d), 2 * d * d_ff + d_ff + d, 2 * d, v * d
    right = n * (3 * attention + 2 * feedforward + 5 * norm) + embedding
    got = answer(d, d_ff, n, v)
    require(got is not None, "it returned None: is there a `return`?")
    wrong = {
        "the biases are missing, of attention and of the feed-forward part": right - n * (12 * d + 2 * (d_ff + d)),
        "the biases of attention are missing": right - n * 12 * d,
        "the biases of the feed-forward part are missing": right - n * 2 * (d_ff + d),
        "the norms are missing": right - n * 5 * norm,
        "a norm has a weight and a bias for each number": right - n * 5 * d,
        "the norm of cross-attention is missing: a decoder layer has three": right - n * norm,
        "the decoder's cross-attention is missing": right - n * attention,
        "cross-attention and its norm are missing": right - n * (attention + norm),
        "the decoder is missing": right - n * (2 * attention + feedforward + 3 * norm),
        "the embedding is missing": right - embedding,
        "the embedding is counted twice: source and target share it": right + embedding,
        "the embedding is counted three times: source, target and head share it": right + 2 * embedding,
        "sinusoidal positions have no parameters": right + d,
    }
    for message, other in wrong.items():
        require(got != other, message)
    require(
        got == right, f"of a model with d = {d}, d_ff = {d_ff}, {n} layers and {v} tokens it says {got}, not {right}"
    )
    require(answer(512, 2048, 6, 37000) == 63_082_496, "it is right for a small model, not for the paper's base model")
