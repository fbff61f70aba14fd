"""Generation for a whole batch at once: prompts as a padded `Batch` in, rows of token ids out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.engine import Engine
from heedful.generate.model_runner import ModelRunner
from heedful.generate.request import Request, Sampling
from heedful.generate.scheduler import bucket_by_length
from heedful.generate.sequence import SequenceGroup
from heedful.models.base import Batch, GenerativeModel, row_lengths


def generate_batch(
    model: GenerativeModel[Any], batch: Batch, max_tokens: int, sampling: Sampling, stop: Collection[int] = ()
) -> list[list[int]]:
    """The new tokens of each row of a batch, without the stop token."""
    prompts = [] if batch.tokens is None else [tuple(row) for row in unpad_tokens(batch.tokens, batch.lengths)]
    sources = [] if batch.source is None else [tuple(row) for row in unpad_tokens(batch.source, batch.source_lengths)]
    requests = [
        Request(prompt or (), source, max_tokens, sampling, stop_ids=frozenset(stop))
        for prompt, source in zip_longest(prompts, sources)
    ]
    engine = Engine(model, max_rows=len(requests), chunk=sum(map(len, [*prompts, *sources])))
    return [result.choices[0].tokens for result in engine.run(requests)]


def greedy_batch(model: GenerativeModel[Any], batch: Batch, max_tokens: int) -> list[list[int]]:
    """`generate_batch` by the most likely token at each step."""
    return generate_batch(model, batch, max_tokens, Sampling(temperature=0))


def request_batches(
    model: GenerativeModel[Any], tokenizer: SupportsDecode | None, requests: Sequence[Request], max_rows: int
) -> list[tuple[list[SequenceGroup], Batch]]:
    """Requests, checked, in padded batches of similar length and at most `max_rows`, each with its groups of sequences.

    For beam search and speculative decoding, which keep a batch from its first to its last step. A group's id is the
    index of its request.
    """
    runner = ModelRunner(model)
    for request in requests:
        runner.check(request)
    groups = [runner.new_group(i, request, tokenizer) for i, request in enumerate(requests)]
    buckets = bucket_by_length(groups, lambda group: group.n_left)
    parts = [bucket[i : i + max_rows] for bucket in buckets for i in range(0, len(bucket), max_rows)]
    return [(part, runner.batch(part, [group.prompt for group in part])) for part in parts]


def unpad_tokens(tokens: Tensor, lengths: Tensor | None) -> list[list[int]]:
    """The rows of (B, T) without their padding."""
    return [row[:n] for row, n in zip(tokens.tolist(), row_lengths(tokens, lengths), strict=True)]


def pad_tokens(rows: Sequence[list[int]], device: torch.device) -> Tensor:
    """Rows of ids as (B, T), padded with 0 to the longest."""
    n = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (n - len(row)) for row in rows], device=device)
