"""Drafters: what guesses the next tokens for speculative decoding.

`DraftModel` asks a smaller model with the same vocabulary. `PromptLookup` copies what followed the last few tokens
where they stood before (Saxena 2023): good where an answer repeats its prompt, and no model at all.

    B rows still being written, T tokens of a step, V vocabulary
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from heedful.generate.engine import Speaker
from heedful.generate.request import Sampling
from heedful.generate.sampling import InvalidLogits, Sampler, apply_penalties, filter_logits
from heedful.kernels.sampling import apply_temperature
from heedful.models.base import Batch, last_of_each, row_lengths
from heedful.nn.state import State


@dataclass
class SpeculativeRow:
    """One text as it grows."""

    index: int  # in the batch that was given
    text: list[int]  # what the decoder was given and what it said
    n_prompt: int
    random: random.Random  # its own, so that it does not depend on the other rows
    reach: int  # how many tokens to propose next

    @property
    def n_said(self) -> int:
        return len(self.text) - self.n_prompt


@dataclass
class Proposal:
    """Guesses at what a row says next."""

    tokens: list[int] = field(default_factory=list)
    chances: list[Tensor] | None = None  # (V,) what each was drawn from; None if no guess was left to chance


class BatchDrafter(Protocol):
    """A drafter at work on a batch."""

    def propose(self, rows: Sequence[SpeculativeRow], counts: Sequence[int]) -> list[Proposal]:
        """At most `counts[b]` tokens that may follow the text of row b."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep these rows; the others have ended."""
        ...


class Drafter(Protocol):
    """Whatever can guess. Bad guesses cost time and change nothing else."""

    most: int  # proposals per step

    def begin(self, batch: Batch, chooser: SpeculativeSampler, vocab_size: int) -> BatchDrafter: ...


def one_hot(token: int, like: Tensor) -> Tensor:
    """The distribution (V,) that has only this token."""
    one = torch.zeros_like(like)
    one[token] = 1
    return one


class SpeculativeSampler:
    """How tokens are chosen, by the model and by the drafter alike."""

    def __init__(self, how: Sampling) -> None:
        self.how = how
        self.quiet = replace(how, temperature=0)  # for what was said alone, without a random stream
        # Always the likeliest token of the model itself: one argmax decides for all rows and places.
        self.simple = how.temperature == 0 and not how.logit_bias and not Sampler(self.quiet).penalizes

    def probabilities(self, logits: Tensor, row: SpeculativeRow, guessed: Sequence[int]) -> Tensor:
        """The distribution (V,) of what follows a row's text and these guesses, by the model's logits (V,)."""
        past = Sampler(self.quiet, row.text[: row.n_prompt])
        for token in [*row.text[row.n_prompt :], *guessed] if past.penalizes else ():
            past.record(token)
        logits = apply_penalties(logits[None], [past])
        highest = float(logits.max())
        if not math.isfinite(highest):
            raise InvalidLogits([row.index], [highest])
        if self.how.temperature == 0:
            return one_hot(int(logits.argmax()), logits[0])
        return filter_logits(apply_temperature(logits, self.how.temperature), self.how).softmax(-1)[0]

    def draw(self, probabilities: Tensor, row: SpeculativeRow) -> int:
        """A token by the row's next random number; never one whose probability is 0."""
        sums = probabilities.double().cumsum(0)
        place = torch.searchsorted(sums, row.random.random() * sums[-1:], right=True)
        return min(int(place), len(sums) - 1)


class PromptLookup:
    """Proposes what followed the text's longest ending (at most `longest` tokens) where it stood last.

    `in_source` looks in what an encoder has read too; both sides must share their vocabulary.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, most: int = 16, in_source: bool = False) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"endings of {shortest} to {longest} tokens: from 1, the shortest first")
        self.sizes, self.most, self.in_source = range(longest, shortest - 1, -1), most, in_source

    def begin(self, batch: Batch, chooser: SpeculativeSampler, vocab_size: int) -> BatchDrafter:
        indices = [_Index(self.sizes, vocab_size) for _ in batch.ids]
        if self.in_source and batch.source is not None:
            for index, source in zip(indices, unpad_rows(batch.source, batch.source_lengths), strict=True):
                index.extend(source)
        return _Lookup(indices)


class _Index:
    """Where the short runs of a row's tokens stood last."""

    def __init__(self, sizes: range, vocab_size: int) -> None:
        self.sizes = sizes  # of the runs, the longest first
        self.vocab_size = vocab_size  # what is read may have more tokens than can be said
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # the place of the token that followed a run
        self.n_text = 0  # how many of them are the row's own text, after those of its source

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for n in self.sizes:
                self.after[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def guess(self, count: int) -> list[int]:
        for n in self.sizes:
            place = self.after.get(tuple(self.tokens[-n:]))
            if place is not None:
                copy = self.tokens[place : place + count]
                while len(copy) < count:  # the run goes on into the ending itself: the text is going round
                    copy += copy[: count - len(copy)]
                return list(takewhile(lambda token: token < self.vocab_size, copy))
        return []


class _Lookup:
    def __init__(self, indices: list[_Index]) -> None:
        self.indices = indices

    def propose(self, rows: Sequence[SpeculativeRow], counts: Sequence[int]) -> list[Proposal]:
        for index, row in zip(self.indices, rows, strict=True):
            index.extend(row.text[index.n_text :])
            index.n_text = len(row.text)
        return [Proposal(index.guess(n)) for index, n in zip(self.indices, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.indices = [self.indices[row] for row in rows]


class DraftModel:
    """Proposes what a smaller model with the same vocabulary would say, as far as its positions reach."""

    def __init__(self, model: Speaker, most: int = 8) -> None:
        self.model, self.most = model, most

    def begin(self, batch: Batch, chooser: SpeculativeSampler, vocab_size: int) -> BatchDrafter:
        longest = self.model.longest
        n = max(tokens.shape[1] for tokens in (batch.tokens, batch.source) if tokens is not None)
        if longest is not None and n > longest:
            raise ValueError(f"the drafter has positions for {longest} tokens, and the prompt has {n}")
        logits, state = self.model.start(batch)
        if logits.shape[-1] != vocab_size:
            raise ValueError(f"the drafter has {logits.shape[-1]} tokens, the model {vocab_size}: not the same")
        return _Draft(self.model, state, chooser, logits.device)


class _Draft:
    def __init__(self, model: Speaker, state: State, chooser: SpeculativeSampler, device: torch.device) -> None:
        self.model, self.state, self.chooser, self.device = model, state, chooser, device

    def propose(self, rows: Sequence[SpeculativeRow], counts: Sequence[int]) -> list[Proposal]:
        drafts = [Proposal([], None if self.chooser.simple else []) for _ in rows]
        self.state.truncate([len(row.text) - 1 for row in rows])  # forget what was refused
        unread = [row.text[n:] for row, n in zip(rows, self.state.lengths, strict=True)]
        n_steps = min(max(counts), self._room(rows, unread))
        if n_steps < 1:
            return drafts
        logits = self.model.step(pad_rows(unread, self.device), self.state)  # (B, T, V)
        self.state.truncate([len(row.text) for row in rows])  # forget the padding
        self._guess(last_of_each(logits, [len(tokens) for tokens in unread]), rows, drafts, counts)
        for _ in range(1, n_steps):
            newest = pad_rows([draft.tokens[-1:] for draft in drafts], self.device)[:, 0]  # (B,)
            self._guess(self.model.step(newest, self.state), rows, drafts, counts)
        return drafts

    def _guess(
        self, logits: Tensor, rows: Sequence[SpeculativeRow], drafts: Sequence[Proposal], counts: Sequence[int]
    ) -> None:
        """One token more for each draft that has fewer than its count, by logits (B, V)."""
        best = logits.argmax(-1).tolist() if self.chooser.simple else []
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if len(draft.tokens) >= counts[i]:
                continue
            if draft.chances is None:
                draft.tokens.append(best[i])
            else:
                draft.chances.append(self.chooser.probabilities(logits[i], row, draft.tokens))
                draft.tokens.append(self.chooser.draw(draft.chances[-1], row))

    def _room(self, rows: Sequence[SpeculativeRow], unread: Sequence[list[int]]) -> int:
        """How many tokens can be drafted before the drafter's own last position."""
        last, n_unread = self.model.longest, max(len(tokens) for tokens in unread)
        if last is None:
            return n_unread + max(len(row.text) for row in rows)
        if max(self.state.lengths) + n_unread > last:
            return 0
        return last + 1 - max(len(row.text) for row in rows)

    def select(self, rows: list[int]) -> None:
        self.state.select(rows)


def unpad_rows(tokens: Tensor, lengths: Tensor | None) -> list[list[int]]:
    """The real tokens of each row (B, T)."""
    return [row[:n] for row, n in zip(tokens.tolist(), row_lengths(tokens, lengths), strict=True)]


def pad_rows(rows: Sequence[list[int]], device: torch.device) -> Tensor:
    """(B, T) with the longest row's T; what stands in the padding does not matter."""
    n = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (n - len(row)) for row in rows], device=device)
