"""Speculative decoding: a cheap drafter guesses several tokens, the model judges all of them in one step.

Leviathan et al. 2023; Chen et al. 2023. A guess that the drafter makes with probability q and the model would make with
p is kept with probability min(1, p/q); the first one refused is replaced by a draw from (p - q)+, and where all are
kept the model adds a token of its own. So every step says one token at least, and what is said follows the model's own
distribution whatever the drafter is: p and q are those after temperature, penalties and cuts. With temperature 0 the
tokens are those of plain decoding (but for logits so near that a step of several tokens rounds them otherwise).

    B rows still being written, T tokens of a step, V vocabulary
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.draft import Drafter, Proposal, SpeculativeRow, SpeculativeSampler, one_hot, pad_rows, unpad_rows
from heedful.generate.engine import Speaker, request_batches
from heedful.generate.request import Request, Sampling
from heedful.generate.sampling import InvalidLogits
from heedful.generate.sequence import Event, SequenceGroup
from heedful.models.base import Batch

GREEDY = Sampling(temperature=0)
FIRST = 4  # proposals before it is known how good they are
ROWS = 32  # prompts answered side by side


@dataclass
class Statistics:
    """What speculation gained. A row counts the steps in which it took part, the one that reads its prompt too."""

    proposed: int = 0  # tokens by the drafter
    accepted: int = 0  # of them
    tokens: int = 0  # said, those that end a row among them
    steps: int = 0  # of all rows
    calls: int = 0  # of the model, each a step of several rows

    @property
    def acceptance(self) -> float:
        return self.accepted / max(self.proposed, 1)

    @property
    def tokens_per_step(self) -> float:
        """Plain decoding has 1."""
        return self.tokens / max(self.steps, 1)


def verify_draft(
    chooser: SpeculativeSampler, logits: Tensor, rows: Sequence[SpeculativeRow], proposals: Sequence[Proposal]
) -> list[tuple[int, int]]:
    """For each row how many proposed tokens stay by the logits (B, T, V) at their places, and the one after."""
    if not chooser.simple:
        return [_judge(chooser, *each) for each in zip(logits, rows, proposals, strict=True)]
    highest, likeliest = logits.max(-1)  # (B, T)
    wrong = (~highest.isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise InvalidLogits([rows[i].index for i in wrong], highest[~highest.isfinite()].tolist())
    judged = []
    for best, proposal in zip(likeliest.tolist(), proposals, strict=True):
        n = 0
        while n < len(proposal.tokens) and proposal.tokens[n] == best[n]:
            n += 1
        judged.append((n, best[n]))
    return judged


def _judge(chooser: SpeculativeSampler, logits: Tensor, row: SpeculativeRow, proposal: Proposal) -> tuple[int, int]:
    for place, token in enumerate(proposal.tokens):
        p = chooser.probabilities(logits[place], row, proposal.tokens[:place])
        q = one_hot(token, p) if proposal.chances is None else proposal.chances[place]
        if row.random.random() * float(q[token]) >= float(p[token]):
            left = (p - q).clamp(min=0)
            if not left.any():  # p = q but for rounding
                left = p
            return place, chooser.draw(left, row)
    n = len(proposal.tokens)
    return n, chooser.draw(chooser.probabilities(logits[n], row, proposal.tokens), row)


class Speculation:
    """Speculative decoding of a batch, step by step: iterate over it, and look at its `statistics` at any time.

    Each step gives the new tokens of every row of the batch, none for a row that has ended. A row ends before a token
    of `stop_ids`, after `max_tokens`, or where the model has no more positions. Where all proposals were accepted, the
    next ones are twice as many; else one more than were accepted.

    The same seed gives a row the same text whatever else is in the batch, as long as none of the batch comes near the
    last position: there all rows get fewer proposals, and use their random numbers otherwise.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Speaker,
        batch: Batch,
        *,
        drafter: Drafter,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = frozenset(),
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: it must be 1 or more")
        self.model, self.max_tokens, self.stop_ids = model, max_tokens, stop_ids
        self.most, self.chooser, self.statistics = drafter.most, SpeculativeSampler(sampling), Statistics(calls=1)
        batch = with_start_token(model, batch)
        logits, self.state = model.start(batch)
        self.logits = logits[:, None]  # (B, T, V) of a row's last token and of what was proposed after it
        self.drafting = drafter.begin(batch, self.chooser, logits.shape[-1])
        self.rows = make_rows(batch, sampling.seed, min(FIRST, self.most))
        self.proposals = [Proposal() for _ in self.rows]
        self.n_rows = len(self.rows)

    def __iter__(self) -> Iterator[list[list[int]]]:
        while self.rows:
            if self.statistics.steps:  # `start` gave the logits for the first
                self._read()
            yield self._say()

    @torch.inference_mode()
    def _say(self) -> list[list[int]]:
        """What each row of the batch says by the logits there are; rows that have ended leave."""
        new: list[list[int]] = [[] for _ in range(self.n_rows)]
        going = []
        judged = verify_draft(self.chooser, self.logits, self.rows, self.proposals)
        for i, (row, proposal, (n, token)) in enumerate(zip(self.rows, self.proposals, judged, strict=True)):
            said = [*proposal.tokens[:n], token]
            end = next((place for place, token in enumerate(said) if token in self.stop_ids), None)
            new[row.index] = said[:end]
            self._count(proposal, n, said if end is None else said[: end + 1])
            row.text += said
            if proposal.tokens:
                row.reach = min(2 * row.reach, self.most) if n == len(proposal.tokens) else n + 1
            if end is None and row.n_said < self.max_tokens and self._fits(row):
                going.append(i)
        self._keep(going)
        return new

    @torch.inference_mode()
    def end(self, index: int) -> None:
        """This row of the batch says no more."""
        self._keep([i for i, row in enumerate(self.rows) if row.index != index])

    def _keep(self, going: list[int]) -> None:
        if 0 < len(going) < len(self.rows):
            self.state.select(going)
            self.drafting.select(going)
        self.rows = [self.rows[i] for i in going]

    @torch.inference_mode()
    def _read(self) -> None:
        """Let the drafter propose, and the model read each row's last token and its proposals."""
        self.state.truncate([len(row.text) - 1 for row in self.rows])  # forget what was refused
        room = self._room()
        counts = [min(row.reach, room - 1, self.max_tokens - row.n_said - 1) for row in self.rows]
        self.proposals = self.drafting.propose(self.rows, counts)
        tokens = [row.text[-1:] + p.tokens for row, p in zip(self.rows, self.proposals, strict=True)]
        self.logits = self.model.step(pad_rows(tokens, self.logits.device), self.state)
        self.statistics.calls += 1

    def _fits(self, row: SpeculativeRow) -> bool:
        return self.model.longest is None or len(row.text) <= self.model.longest

    def _room(self) -> int:
        """How many tokens the model can read in one step: not past its last position nor across a border."""
        read = [len(row.text) - 1 for row in self.rows]
        last, border = self.model.longest, self.state.original
        room = [self.max_tokens] if last is None else [last - n for n in read]
        return min(room + [border - n for n in read if border is not None and n < border])

    def _count(self, proposal: Proposal, n_accepted: int, said: Sequence[int]) -> None:
        self.statistics.proposed += len(proposal.tokens)
        self.statistics.accepted += min(n_accepted, len(said))
        self.statistics.tokens += len(said)
        self.statistics.steps += 1


def speculate(model: Speaker, batch: Batch, **how: Any) -> tuple[list[list[int]], Statistics]:
    """All new tokens of each row, and what it took; see `Speculation`, which gives them as they come, for the rest."""
    steps = Speculation(model, batch, **how)
    rows: list[list[int]] = [[] for _ in steps.rows]
    for step in steps:
        for row, tokens in zip(rows, step, strict=True):
            row += tokens
    return rows, steps.statistics


def run_speculative(
    model: Speaker, tokenizer: SupportsDecode | None, requests: Sequence[Request], drafter: Drafter
) -> Iterator[Event]:
    """Answer requests that differ in their prompts alone, with the engine's events: one answer to each, no scores.

    The id of an event is its request's place. A seed gives the same text again, but not that of plain decoding, since
    guesses take random numbers too.
    """
    for r in requests:
        asked = {
            "n": r.n > 1,
            "best_of": (r.best_of or 1) > 1,
            "logprobs": r.logprobs is not None,
            "echo": r.echo,
        }
        if any(asked.values()):
            wrong = ", ".join(name for name, is_asked in asked.items() if is_asked)
            raise ValueError(f"speculation gives one answer without scores: leave out {wrong}, or the draft")
    return _answer(model, request_batches(model, tokenizer, requests, ROWS), drafter)


def _answer(model: Speaker, batches: Sequence[tuple[list[SequenceGroup], Batch]], drafter: Drafter) -> Iterator[Event]:
    for tasks, batch in batches:
        one = tasks[0].request
        steps = Speculation(model, batch, drafter=drafter, max_tokens=one.max_tokens, sampling=one.sampling)
        for step in steps:
            for row, (task, tokens) in enumerate(zip(tasks, step, strict=True)):
                yield from _take(task, tokens, model.longest)
                if task.done:
                    steps.end(row)


def _take(task: SequenceGroup, tokens: Sequence[int], longest: int | None) -> Iterator[Event]:
    """What a request's answer makes of its new tokens, up to its end."""
    (said,) = task.answers
    for token in tokens:
        n_read = len(task.prompt) + len(said.tokens)
        event = said.take(token, None, full=longest is not None and n_read >= longest)
        event.result = task.result() if task.done else None
        yield event
        if task.done:
            return


def with_start_token(model: Speaker, batch: Batch) -> Batch:
    """The batch with the token that an encoder-decoder begins with, if nothing is there: the drafter begins alike."""
    start = getattr(model, "start_id", None)
    if batch.tokens is not None or batch.source is None or start is None:
        return batch
    return replace(batch, tokens=batch.source.new_full((len(batch.source), 1), start), lengths=None)


def make_rows(batch: Batch, seed: int | None, reach: int) -> list[SpeculativeRow]:
    texts = unpad_rows(batch.ids, batch.lengths)
    seeds = [seed] * len(texts)
    if seed is None:
        seeds = torch.randint(2**62, (len(texts),)).tolist()
    return [SpeculativeRow(i, text, len(text), random.Random(seeds[i]), reach) for i, text in enumerate(texts)]
