"""Drafters of speculative decoding: what proposes the next tokens.

`DraftModel` samples from a smaller model with the same vocabulary. `PromptLookup` copies what followed the last few
tokens where they occurred before (Saxena 2023): good where an answer repeats its prompt, and no model at all.

    B unfinished rows, T tokens of a step, V vocabulary
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from heedful.generate.batch import pad_tokens, unpad_tokens
from heedful.generate.matcher import Matcher
from heedful.generate.request import Sampling
from heedful.generate.sampling import InvalidLogits, Sampler, apply_penalties, filter_logits, to_sampling_device
from heedful.kernels.sampling import apply_temperature
from heedful.models.base import Batch, GenerativeModel, last_of_each
from heedful.nn.state import State


@dataclass
class SpeculativeRow:
    """One sequence of a batch in speculative decoding."""

    index: int  # in the batch
    tokens: list[int]  # the prompt and the generated tokens
    n_prompt: int
    random: random.Random  # its own, so that it does not depend on the other rows
    n_draft: int  # how many tokens to propose next

    @property
    def n_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.n_prompt


@dataclass
class Proposal:
    """Draft tokens of one row."""

    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] | None = None  # (V,) that each was sampled from; None if they are deterministic


class BatchDrafter(Protocol):
    """The state of a drafter for one batch."""

    def propose(self, rows: Sequence[SpeculativeRow], counts: Sequence[int]) -> list[Proposal]:
        """At most `counts[b]` tokens that may follow row b."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep these rows; the others have finished."""
        ...


class Drafter(Protocol):
    """Anything that proposes tokens. Bad proposals cost time and change no result."""

    most: int  # proposals per step

    def begin(self, batch: Batch, sampler: SpeculativeSampler, vocab_size: int) -> BatchDrafter:
        """Prefill a batch; `sampler` is how the target model samples."""
        ...


def one_hot(token: int, like: Tensor) -> Tensor:
    """The distribution (V,) with all mass on this token."""
    one = torch.zeros_like(like)
    one[token] = 1
    return one


class SpeculativeSampler:
    """The sampling rule that the target model and the drafter share."""

    def __init__(
        self,
        params: Sampling,
        *,
        min_tokens: int = 0,
        stop_ids: Collection[int] = frozenset(),
        matcher: Matcher | None = None,
    ) -> None:
        self.params, self._min_tokens, self._stop_ids = params, min_tokens, stop_ids
        self._matcher = None if matcher is None else matcher.copy()  # at the begin of every row's text
        self._without_random = replace(params, temperature=0)  # for the penalties alone
        # The likeliest token of the unmodified logits: one argmax decides for all rows and positions.
        self.greedy = params.temperature == 0 and not self._sampler().changes_logits

    def _sampler(self, prompt: Sequence[int] = ()) -> Sampler:
        matcher = None if self._matcher is None else self._matcher.copy()
        return Sampler(
            self._without_random, prompt, min_tokens=self._min_tokens, stop_ids=self._stop_ids, matcher=matcher
        )

    def probabilities(self, logits: Tensor, row: SpeculativeRow, draft: Sequence[int]) -> Tensor:
        """The distribution (V,) after a row's tokens and these draft tokens, given the model's logits (V,)."""
        past = self._sampler(row.tokens[: row.n_prompt])
        for token in [*row.tokens[row.n_prompt :], *draft] if past.changes_logits else ():
            past.record(token)
        logits = apply_penalties(to_sampling_device(logits[None]), [past])
        highest = float(logits.max())
        if not math.isfinite(highest):
            raise InvalidLogits([row.index], [highest])
        if self.params.temperature == 0:
            return one_hot(int(logits.argmax()), logits[0])
        return filter_logits(apply_temperature(logits, self.params.temperature), self.params).softmax(-1)[0]

    def draw(self, probabilities: Tensor, row: SpeculativeRow) -> int:
        """A token by the row's next random number; never one whose probability is 0."""
        sums = probabilities.double().cumsum(0)
        place = torch.searchsorted(sums, row.random.random() * sums[-1:], right=True)
        return min(int(place), len(sums) - 1)


class PromptLookup:
    """Proposes what followed the last occurrence of a row's longest suffix (at most `longest` tokens).

    `in_source` searches an encoder's input too; both sides must share their vocabulary.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, most: int = 16, in_source: bool = False) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"endings of {shortest} to {longest} tokens: from 1, the shortest first")
        self.sizes, self.most, self.in_source = range(longest, shortest - 1, -1), most, in_source

    def begin(self, batch: Batch, sampler: SpeculativeSampler, vocab_size: int) -> BatchDrafter:
        """An n-gram index for each row."""
        indices = [_NgramIndex(self.sizes, vocab_size) for _ in batch.ids]
        if self.in_source and batch.source is not None:
            for index, source in zip(indices, unpad_tokens(batch.source, batch.source_lengths), strict=True):
                index.extend(source)
        return _BatchLookup(indices)


class _NgramIndex:
    """Where the n-grams of a row occurred last."""

    def __init__(self, sizes: range, vocab_size: int) -> None:
        self.sizes = sizes  # of the n-grams, longest first
        self.vocab_size = vocab_size  # of the output; the input vocabulary may be larger
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it
        self.n_row = 0  # how many of the tokens are the row's own, after those of its source

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for n in self.sizes:
                self.after[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        for n in self.sizes:
            place = self.after.get(tuple(self.tokens[-n:]))
            if place is not None:
                copy = self.tokens[place : place + count]
                while len(copy) < count:  # the copy reaches the suffix itself: the text is repeating
                    copy += copy[: count - len(copy)]
                return list(takewhile(lambda token: token < self.vocab_size, copy))
        return []


class _BatchLookup:
    def __init__(self, indices: list[_NgramIndex]) -> None:
        self.indices = indices

    def propose(self, rows: Sequence[SpeculativeRow], counts: Sequence[int]) -> list[Proposal]:
        for index, row in zip(self.indices, rows, strict=True):
            index.extend(row.tokens[index.n_row :])
            index.n_row = len(row.tokens)
        return [Proposal(index.continuation(n)) for index, n in zip(self.indices, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.indices = [self.indices[row] for row in rows]


class DraftModel:
    """Proposes what a smaller model with the same vocabulary generates, as far as its positions reach."""

    def __init__(self, model: GenerativeModel[Any], most: int = 8) -> None:
        self.model, self.most = model, most

    def begin(self, batch: Batch, sampler: SpeculativeSampler, vocab_size: int) -> BatchDrafter:
        """Prefill the draft model; ValueError if the prompt or the vocabulary does not fit."""
        longest = self.model.context_length
        n = max(tokens.shape[1] for tokens in (batch.tokens, batch.source) if tokens is not None)
        if longest is not None and n > longest:
            raise ValueError(f"the drafter has positions for {longest} tokens, and the prompt has {n}")
        logits, state = self.model.start(batch)
        if logits.shape[-1] != vocab_size:
            raise ValueError(f"the drafter has {logits.shape[-1]} tokens, the model {vocab_size}: not the same")
        return _BatchDraft(self.model, state, sampler, logits.device)


class _BatchDraft:
    def __init__(
        self, model: GenerativeModel[Any], state: State, sampler: SpeculativeSampler, device: torch.device
    ) -> None:
        self.model, self.state, self.sampler, self.device = model, state, sampler, device

    def propose(self, rows: Sequence[SpeculativeRow], counts: Sequence[int]) -> list[Proposal]:
        drafts = [Proposal([], None if self.sampler.greedy else []) for _ in rows]
        self.state.truncate([len(row.tokens) - 1 for row in rows])  # drop what was rejected
        unread = [row.tokens[n:] for row, n in zip(rows, self.state.lengths, strict=True)]
        n_steps = min(max(counts), self._n_positions(rows, unread))
        if n_steps < 1:
            return drafts
        logits = self.model.step(pad_tokens(unread, self.device), self.state)  # (B, T, V)
        self.state.truncate([len(row.tokens) for row in rows])  # drop the padding
        self._extend(last_of_each(logits, [len(tokens) for tokens in unread]), rows, drafts, counts)
        for _ in range(1, n_steps):
            newest = pad_tokens([draft.tokens[-1:] for draft in drafts], self.device)[:, 0]  # (B,)
            self._extend(self.model.step(newest, self.state), rows, drafts, counts)
        return drafts

    def _extend(
        self,
        logits: Tensor,
        rows: Sequence[SpeculativeRow],
        drafts: Sequence[Proposal],
        counts: Sequence[int],
    ) -> None:
        """One token more for each draft that has fewer than its count, by logits (B, V)."""
        best = logits.argmax(-1).tolist() if self.sampler.greedy else []
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if len(draft.tokens) >= counts[i]:
                continue
            if draft.distributions is None:
                draft.tokens.append(best[i])
            else:
                draft.distributions.append(self.sampler.probabilities(logits[i], row, draft.tokens))
                draft.tokens.append(self.sampler.draw(draft.distributions[-1], row))

    def _n_positions(self, rows: Sequence[SpeculativeRow], unread: Sequence[list[int]]) -> int:
        """How many tokens can be drafted before the draft model's own last position."""
        last, n_unread = self.model.context_length, max(len(tokens) for tokens in unread)
        if last is None:
            return n_unread + max(len(row.tokens) for row in rows)
        if max(self.state.lengths) + n_unread > last:
            return 0
        return last + 1 - max(len(row.tokens) for row in rows)

    def select(self, rows: list[int]) -> None:
        self.state.select(rows)
