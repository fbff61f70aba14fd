"""Decoding through the contract: any family that can `start` and `step` can speak."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from heedful.generate.request import Sampling
from heedful.generate.sampling import choose
from heedful.models.base import Batch
from heedful.nn.state import State
from heedful.text import Tokenizer


class Speaker(Protocol):
    """What decoding needs of a model."""

    @property
    def longest(self) -> int | None: ...
    def start(self, batch: Batch, *, capacity: int = 0) -> tuple[Tensor, State]: ...
    def step(self, tokens: Tensor, state: Any) -> Tensor: ...  # the state that `start` gave


def decode(
    model: Speaker, batch: Batch, max_tokens: int, how: Sampling, stop: Collection[int] = ()
) -> Iterator[list[int | None]]:
    """At each step one token per row; None for a row that has ended. A row ends after a token of `stop`.

    Where the model has a last position, generation ends there as at `max_tokens`.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: it must be 1 or more")
    with torch.inference_mode():
        logits, state = model.start(batch)
    generator = None
    if how.seed is not None:
        generator = torch.Generator(logits.device).manual_seed(how.seed)
    done = [False] * state.n_rows
    for count in range(max_tokens):
        with torch.inference_mode():  # not across the yield: the caller's own code is none of ours
            tokens = choose(logits, how, generator)
        ids = tokens.tolist()
        yield [None if ended else token for token, ended in zip(ids, done, strict=True)]
        done = [ended or token in stop for token, ended in zip(ids, done, strict=True)]
        full = model.longest is not None and max(state.lengths) >= model.longest
        if all(done) or full or count + 1 == max_tokens:
            return
        with torch.inference_mode():
            logits = model.step(tokens, state)


def generate(
    model: Speaker, batch: Batch, max_tokens: int, how: Sampling, stop: Collection[int] = ()
) -> list[list[int]]:
    """All new tokens of each row; the token it stopped at is not among them."""
    rows: list[list[int]] = []
    for step in decode(model, batch, max_tokens, how, stop):
        rows = rows or [[] for _ in step]
        for row, token in zip(rows, step, strict=True):
            if token is not None and token not in stop:
                row.append(token)
    return rows


def greedy(model: Speaker, batch: Batch, max_tokens: int) -> list[list[int]]:
    """The most likely token at each step, for every row."""
    return generate(model, batch, max_tokens, Sampling(temperature=0))


def pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as it comes, in pieces that never split a character and that join to the whole.

    Only what has not been shown is decoded again, after the tokens shown last: a decoder may treat the first token of
    a text otherwise than the others.
    """
    shown: list[int] = []
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        before = tokenizer.decode(shown)
        text = tokenizer.decode(shown + waiting)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(before) :]
            shown, waiting = waiting, []
    if waiting:
        yield tokenizer.decode(shown + waiting)[len(tokenizer.decode(shown)) :]
