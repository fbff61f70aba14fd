"""Speculative decoding: a cheap drafter proposes several tokens, the target model verifies all of them in one step.

Leviathan et al. 2023; Chen et al. 2023. A token that the drafter proposes with probability q and the target model would
sample with p is accepted with probability min(1, p/q); the first one rejected is replaced by a sample from (p - q)+,
and where all are accepted the target model adds a token of its own. So every step generates one token at least, and
the output follows the target model's distribution whatever the drafter is: p and q are those after temperature,
penalties and filters. With temperature 0 the tokens are those of plain decoding (but for logits so near that a step of
several tokens rounds them otherwise).

    B unfinished rows, T tokens of a step, V vocabulary
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heedful.generate.batch import pad_tokens, request_batches, unpad_tokens
from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.draft import Drafter, Proposal, SpeculativeRow, SpeculativeSampler, one_hot
from heedful.generate.request import Request, Sampling
from heedful.generate.sampling import InvalidLogits
from heedful.generate.sequence import Event, SequenceGroup
from heedful.models.base import Batch, GenerativeModel

GREEDY = Sampling(temperature=0)
FIRST = 4  # proposals before the acceptance rate is known
ROWS = 32  # prompts of a batch


@dataclass
class Statistics:
    """Counts of speculative decoding. A row counts the steps in which it took part, its prefill too."""

    proposed: int = 0  # draft tokens
    accepted: int = 0  # of them
    tokens: int = 0  # generated, stop tokens included
    steps: int = 0  # of all rows
    calls: int = 0  # passes of the target model, each a step of several rows

    @property
    def acceptance(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.accepted / max(self.proposed, 1)

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per row and step; plain decoding has 1."""
        return self.tokens / max(self.steps, 1)


def verify_draft(
    sampler: SpeculativeSampler, logits: Tensor, rows: Sequence[SpeculativeRow], proposals: Sequence[Proposal]
) -> list[tuple[int, int]]:
    """For each row how many draft tokens are accepted, given logits (B, T, V) at their positions, and the token after
    them."""
    if not sampler.greedy:
        return [_verify_row(sampler, *each) for each in zip(logits, rows, proposals, strict=True)]
    highest, likeliest = logits.max(-1)  # (B, T)
    wrong = (~highest.isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise InvalidLogits([rows[i].index for i in wrong], highest[~highest.isfinite()].tolist())
    verified = []
    for best, proposal in zip(likeliest.tolist(), proposals, strict=True):
        n = 0
        while n < len(proposal.tokens) and proposal.tokens[n] == best[n]:
            n += 1
        verified.append((n, best[n]))
    return verified


def _verify_row(
    sampler: SpeculativeSampler, logits: Tensor, row: SpeculativeRow, proposal: Proposal
) -> tuple[int, int]:
    for place, token in enumerate(proposal.tokens):
        p = sampler.probabilities(logits[place], row, proposal.tokens[:place])
        q = one_hot(token, p) if proposal.distributions is None else proposal.distributions[place]
        if row.random.random() * float(q[token]) >= float(p[token]):
            left = (p - q).clamp(min=0)
            if not left.any():  # p = q but for rounding
                left = p
            return place, sampler.draw(left, row)
    n = len(proposal.tokens)
    return n, sampler.draw(sampler.probabilities(logits[n], row, proposal.tokens), row)


class SpeculativeDecoding:
    """Speculative decoding of a batch: an iterator over steps, with `statistics` that can be read at any time.

    Each step yields the new tokens of every row of the batch, none for a row that has finished. A row finishes before a
    token of `stop_ids`, after `max_tokens`, or at the model's last position. Where all draft tokens were accepted, the
    next draft is twice as long; else one more than were accepted.

    The same seed gives a row the same tokens whatever else is in the batch, as long as no row comes near the last
    position: there all rows get shorter drafts, and use their random numbers otherwise.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: GenerativeModel[Any],
        batch: Batch,
        *,
        drafter: Drafter,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = frozenset(),
        sampler: SpeculativeSampler | None = None,  # None: that of `sampling`
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: it must be 1 or more")
        self.model, self.max_tokens, self.stop_ids = model, max_tokens, stop_ids
        self.most, self.statistics = drafter.most, Statistics(calls=1)
        self.sampler = sampler or SpeculativeSampler(sampling)
        batch = with_start_token(model, batch)
        logits, self.state = model.start(batch)
        self.logits = logits[:, None]  # (B, T, V) after a row's last token and after each draft token
        self.drafter = drafter.begin(batch, self.sampler, logits.shape[-1])
        self.rows = make_rows(batch, sampling.seed, min(FIRST, self.most))
        self.proposals = [Proposal() for _ in self.rows]
        self.n_rows = len(self.rows)

    def __iter__(self) -> Iterator[list[list[int]]]:
        while self.rows:
            if self.statistics.steps:  # `start` gave the logits of the first step
                self._propose()
            yield self._accept()

    @torch.inference_mode()
    def _propose(self) -> None:
        """Draft tokens for each row, and the target model's logits at their positions."""
        self.state.truncate([len(row.tokens) - 1 for row in self.rows])  # drop what was rejected
        limit = self._max_step()
        counts = [min(row.n_draft, limit - 1, self.max_tokens - row.n_generated - 1) for row in self.rows]
        self.proposals = self.drafter.propose(self.rows, counts)
        tokens = [row.tokens[-1:] + p.tokens for row, p in zip(self.rows, self.proposals, strict=True)]
        self.logits = self.model.step(pad_tokens(tokens, self.logits.device), self.state)
        self.statistics.calls += 1

    @torch.inference_mode()
    def _accept(self) -> list[list[int]]:
        """Verify the drafts: the new tokens of each row of the batch. Finished rows are dropped."""
        new: list[list[int]] = [[] for _ in range(self.n_rows)]
        going = []
        verified = verify_draft(self.sampler, self.logits, self.rows, self.proposals)
        for i, (row, proposal, (n, token)) in enumerate(zip(self.rows, self.proposals, verified, strict=True)):
            tokens = [*proposal.tokens[:n], token]
            end = next((place for place, token in enumerate(tokens) if token in self.stop_ids), None)
            new[row.index] = tokens[:end]
            self._count(proposal, n, tokens if end is None else tokens[: end + 1])
            row.tokens += tokens
            if proposal.tokens:
                row.n_draft = min(2 * row.n_draft, self.most) if n == len(proposal.tokens) else n + 1
            if end is None and row.n_generated < self.max_tokens and self._fits(row):
                going.append(i)
        self._keep(going)
        return new

    @torch.inference_mode()
    def finish(self, index: int) -> None:
        """Drop a row of the batch."""
        self._keep([i for i, row in enumerate(self.rows) if row.index != index])

    def _keep(self, going: list[int]) -> None:
        if 0 < len(going) < len(self.rows):
            self.state.select(going)
            self.drafter.select(going)
        self.rows = [self.rows[i] for i in going]

    def _fits(self, row: SpeculativeRow) -> bool:
        return self.model.context_length is None or len(row.tokens) <= self.model.context_length

    def _max_step(self) -> int:
        """How many tokens one step can take: not past the last position, nor across the LongRoPE switch length."""
        lengths = [len(row.tokens) - 1 for row in self.rows]
        last, switch = self.model.context_length, self.state.switch_length
        limits = [self.max_tokens] if last is None else [last - n for n in lengths]
        return min(limits + [switch - n for n in lengths if switch is not None and n < switch])

    def _count(self, proposal: Proposal, n_accepted: int, tokens: Sequence[int]) -> None:
        self.statistics.proposed += len(proposal.tokens)
        self.statistics.accepted += min(n_accepted, len(tokens))
        self.statistics.tokens += len(tokens)
        self.statistics.steps += 1


def speculate(model: GenerativeModel[Any], batch: Batch, **options: Any) -> tuple[list[list[int]], Statistics]:
    """All new tokens of each row, and the statistics; `options` are those of `SpeculativeDecoding`."""
    steps = SpeculativeDecoding(model, batch, **options)
    rows: list[list[int]] = [[] for _ in steps.rows]
    for step in steps:
        for row, tokens in zip(rows, step, strict=True):
            row += tokens
    return rows, steps.statistics


def run_speculative(
    model: GenerativeModel[Any], tokenizer: SupportsDecode | None, requests: Sequence[Request], drafter: Drafter
) -> Iterator[Event]:
    """Run requests that differ in their prompts alone, with the engine's events: one sequence for each, no scores.

    The id of an event is its request's index. A seed repeats its text, but not that of plain decoding, since drafts
    take random numbers too.
    """
    for r in requests:
        wanted = {
            "n": r.n > 1,
            "best_of": (r.best_of or 1) > 1,
            "logprobs": r.logprobs is not None,
            "echo": r.echo,
        }
        if any(wanted.values()):
            wrong = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
            raise ValueError(f"speculation gives one answer, without scores: leave out {wrong}, or the draft")
    return _run(model, request_batches(model, tokenizer, requests, ROWS), drafter)


def _run(
    model: GenerativeModel[Any], batches: Sequence[tuple[list[SequenceGroup], Batch]], drafter: Drafter
) -> Iterator[Event]:
    for groups, batch in batches:
        one = groups[0].request
        sampler = SpeculativeSampler(
            one.sampling,
            min_tokens=one.min_tokens,
            stop_ids=one.stop_ids,
            matcher=groups[0].sequences[0].sampler.matcher,
        )
        steps = SpeculativeDecoding(
            model, batch, drafter=drafter, max_tokens=one.max_tokens, sampling=one.sampling, sampler=sampler
        )
        for step in steps:
            for row, (group, tokens) in enumerate(zip(groups, step, strict=True)):
                yield from _append(group, tokens, model.context_length)
                if group.finished:
                    steps.finish(row)


def _append(group: SequenceGroup, tokens: Sequence[int], longest: int | None) -> Iterator[Event]:
    """The events of a request's new tokens, up to its end."""
    (sequence,) = group.sequences
    for token in tokens:
        sequence.sampler.record(token)
        n_cached = len(group.prompt) + len(sequence.tokens)
        event = sequence.append(token, None, full=longest is not None and n_cached >= longest)
        event.result = group.result() if group.finished else None
        yield event
        if group.finished:
            return


def with_start_token(model: GenerativeModel[Any], batch: Batch) -> Batch:
    """The batch with an encoder-decoder's start token where it has no prompt, so that the drafter starts alike."""
    start = getattr(model, "start_id", None)
    if batch.tokens is not None or batch.source is None or start is None:
        return batch
    return replace(batch, tokens=batch.source.new_full((len(batch.source), 1), start), lengths=None)


def make_rows(batch: Batch, seed: int | None, n_draft: int) -> list[SpeculativeRow]:
    """The rows of a batch, each with its own random stream."""
    rows = unpad_tokens(batch.ids, batch.lengths)
    seeds = [seed] * len(rows)
    if seed is None:
        seeds = torch.randint(2**62, (len(rows),)).tolist()
    return [SpeculativeRow(i, row, len(row), random.Random(seeds[i]), n_draft) for i, row in enumerate(rows)]
