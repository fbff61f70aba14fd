"""Beam search: at each step the few likeliest beginnings of an answer go on, where greedy decoding keeps one.

An answer's score is its log-probability divided by length ** length_penalty, its end counted: penalty 0 compares
probabilities, 1 the mean per token, more favours longer answers. As many ended answers are kept as there are beams,
and `early_stopping` says when they are good enough to stop looking:

    True     as soon as there are that many
    False    when the best beginning, were it to end now, would not be among them: nearly always right
    "never"  when no continuation of it could be among them, however long (for penalties of 0 or more)

Diverse beam search (Vijayakumar et al. 2018) splits the beams into groups that take turns at each step; a token costs
`diversity` for each time the groups before have just chosen it. That cost steers the choice and is no part of a score.
Contrastive search (Su et al. 2022) is not here: it compares hidden states, which `step` does not hand out.

    N inputs still searched, G groups, W beginnings in each (1 at first), K candidates, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.engine import request_batches
from heedful.generate.request import Choice, FinishReason, Request, Result, Sampling
from heedful.generate.sequence import GeneratedSequence, SequenceGroup
from heedful.models.base import Batch, GenerativeModel

ROWS = 64  # beams of all prompts that are searched side by side


@dataclass(frozen=True)
class Hypothesis:
    """One answer found; the token that ended it is not among its tokens, but counts in its numbers."""

    tokens: tuple[int, ...]
    end: int | None  # the token that ended it, None if it was cut off
    logprob: float  # of all of it
    score: float  # the same divided by length ** length_penalty

    @property
    def finish_reason(self) -> FinishReason:
        return "length" if self.end is None else "stop"


@dataclass(frozen=True)
class _Plan:
    """What `beam_search` was asked for, checked."""

    beams: int
    max_tokens: int
    length_penalty: float
    n: int
    early_stopping: bool | Literal["never"]
    eos: frozenset[int]
    never: frozenset[int]
    min_tokens: int
    groups: int
    diversity: float

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens} and min_tokens {self.min_tokens}: "
                "max_tokens is 1 or more, min_tokens from 0 to max_tokens"
            )
        if not 1 <= self.n <= self.beams:
            raise ValueError(f"n is {self.n} with {self.beams} beams: n is from 1 to the number of beams")
        if self.groups < 1 or self.beams % self.groups:
            raise ValueError(f"{self.beams} beams cannot be split into {self.groups} equal groups")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f'early_stopping is {self.early_stopping!r}: it must be True, False or "never"')
        for name in "length_penalty", "diversity":
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}: it must be a number")

    @property
    def width(self) -> int:
        """Beams of a group."""
        return self.beams // self.groups

    def score(self, logprob: float, length: int) -> float:
        return logprob / float(length) ** self.length_penalty


@dataclass(frozen=True)
class _Beginning:
    tokens: tuple[int, ...]
    logprob: float


# A continuation: the log-probability of all of it, which of the beginnings it continues, its token.
_Candidate = tuple[float, int, int]


class _Group:
    """The beginnings of one group of one input, best first, and the best answers that have ended."""

    def __init__(self, plan: _Plan, limit: int) -> None:
        self.plan, self.limit = plan, limit  # the most tokens there can be
        self.running = [_Beginning((), 0.0)]
        self.parents = [0]  # which of the beginnings before each of them continues
        self.ended: list[Hypothesis] = []
        self.done = False

    def advance(self, candidates: list[_Candidate]) -> None:
        """Go on with the best candidates; there are enough of them for all to end that may."""
        width, before = self.plan.width, self.running
        length = len(before[0].tokens) + 1
        self.running, self.parents = [], []
        for rank, (logprob, parent, token) in enumerate(candidates):
            # Ended or not, what is not among the best has no place: it is here in case the best all end.
            if token in self.plan.eos:
                if rank < width:
                    self._end(before[parent].tokens, token, logprob, length)
            elif len(self.running) < width:
                self.running.append(_Beginning((*before[parent].tokens, token), logprob))
                self.parents.append(parent)
                if rank < width and length == self.limit:
                    self._end(self.running[-1].tokens, None, logprob, length)
        self.done = self.done or self._is_finished(length)

    def _end(self, tokens: tuple[int, ...], end: int | None, logprob: float, length: int) -> None:
        if self.done or logprob == -math.inf:
            return
        self.ended.append(Hypothesis(tokens, end, logprob, self.plan.score(logprob, length)))
        self.ended.sort(key=lambda h: -h.score)
        del self.ended[self.plan.width :]

    def _is_finished(self, length: int) -> bool:
        if length == self.limit or not self.running:
            return True
        if len(self.ended) < self.plan.width:
            return False
        if self.plan.early_stopping is True:
            return True
        longer_is_better = self.plan.early_stopping == "never" and self.plan.length_penalty > 0
        best = max(beginning.logprob for beginning in self.running)
        return self.plan.score(best, self.limit if longer_is_better else length) <= self.ended[-1].score


def beam_search(
    model: GenerativeModel[Any],
    batch: Batch,
    *,
    beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    n: int = 1,
    early_stopping: bool | Literal["never"] = False,
    eos: Collection[int] = frozenset(),
    never: Collection[int] = frozenset(),
    min_tokens: int = 0,
    groups: int = 1,
    diversity: float = 0.0,
) -> list[list[Hypothesis]]:
    """The n best answers to each row of the batch, best first; fewer where fewer were found.

    An answer ends with a token of `eos` once it has `min_tokens`, at `max_tokens`, and at the model's last position.
    No answer has a token of `never`.
    """
    ends, banned = frozenset(eos), frozenset(never)
    plan = _Plan(beams, max_tokens, length_penalty, n, early_stopping, ends, banned, min_tokens, groups, diversity)
    with torch.inference_mode():
        logits, state = model.start(batch)
        inputs = [[_Group(plan, _limit(model, plan, length)) for _ in range(groups)] for length in state.lengths]
        if groups > 1:  # they differ from the first token on
            rows = [row for row in range(state.n_rows) for _ in range(groups)]
            state.select(rows)
            logits = logits[rows]
        live = inputs
        while True:
            _advance(plan, live, logits)
            rows = _rows(live, state.n_rows)
            live = [found for found in live if not _is_done(found)]
            if not live:
                return [_best(plan, found) for found in inputs]
            if rows != list(range(state.n_rows)):
                state.select(rows)
            last = [b.tokens[-1] for found in live for group in found for b in group.running]
            logits = model.step(torch.tensor(last, device=logits.device), state)


def _limit(model: GenerativeModel[Any], plan: _Plan, n_read: int) -> int:
    """How many tokens fit after those read; the last one is said and never read."""
    return plan.max_tokens if model.longest is None else min(plan.max_tokens, model.longest - n_read + 1)


def _is_done(groups: list[_Group]) -> bool:
    return all(group.done for group in groups)


def _rows(inputs: list[list[_Group]], n_rows: int) -> list[int]:
    """The state's rows that go on, one for each beginning that continues them; an input that is done has none."""
    width = n_rows // sum(len(groups) for groups in inputs)  # as it was before
    rows = []
    for i, groups in enumerate(inputs):
        for g, group in enumerate(groups):
            first = (i * len(groups) + g) * width
            rows += [] if _is_done(groups) else [first + parent for parent in group.parents]
    return rows


def _advance(plan: _Plan, inputs: list[list[_Group]], logits: Tensor) -> None:
    """One more token for every beginning; logits (N·G·W, V)."""
    n_inputs, n_vocab = len(inputs), logits.shape[-1]
    precise = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.log_softmax(-1, dtype=precise).view(n_inputs, plan.groups, -1, n_vocab)  # (N, G, W, V)
    ends = [token for token in plan.eos if 0 <= token < n_vocab]
    banned = [token for token in plan.never if 0 <= token < n_vocab]
    if len(inputs[0][0].running[0].tokens) < plan.min_tokens:
        banned += ends
    if banned:
        logprobs[..., banned] = -torch.inf
    cost: Tensor | None = None
    for g in range(plan.groups):
        groups = [of_input[g] for of_input in inputs]
        totals = logprobs.new_tensor([[b.logprob for b in group.running] for group in groups])  # (N, W)
        # Each beginning may end in every way there is, and as many as before must go on.
        count = plan.width * (1 + len(ends))
        candidates = _candidates(logprobs[:, g], totals, count, cost)
        for group, found in zip(groups, candidates, strict=True):
            group.advance(found)
        if plan.groups > 1:
            said = [[b.tokens[-1] for b in group.running] for group in groups]
            chosen = torch.tensor(said, dtype=torch.long, device=logprobs.device)  # (N, W)
            cost = logprobs.new_zeros(n_inputs, n_vocab) if cost is None else cost
            cost.scatter_add_(1, chosen, cost.new_full(chosen.shape, plan.diversity))


def _candidates(logprobs: Tensor, totals: Tensor, count: int, cost: Tensor | None) -> list[list[_Candidate]]:
    """The best `count` continuations of each input, best first: by the log-probability of its beginning (N, W) and of
    the token (N, W, V), less what the token costs (N, V)."""
    n_vocab = logprobs.shape[-1]
    per_row = min(count, n_vocab)
    ranked = logprobs if cost is None else logprobs - cost[:, None]
    values, tokens = ranked.topk(per_row)  # of each row, which threads share: (N, W, K)
    values = (values + totals[..., None]).flatten(1)
    places = values.topk(min(count, values.shape[1])).indices  # of all rows: (N, K)
    parents, tokens = places // per_row, tokens.flatten(1).gather(1, places)
    chosen = logprobs.flatten(1).gather(1, parents * n_vocab + tokens) + totals.gather(1, parents)
    found = zip(chosen.tolist(), parents.tolist(), tokens.tolist(), strict=True)
    return [list(zip(*of_input, strict=True)) for of_input in found]


def _best(plan: _Plan, groups: list[_Group]) -> list[Hypothesis]:
    """The best of all groups; what two of them found counts once."""
    found: dict[tuple[tuple[int, ...], int | None], Hypothesis] = {}
    for hypothesis in sorted((h for group in groups for h in group.ended), key=lambda h: -h.score):
        found.setdefault((hypothesis.tokens, hypothesis.end), hypothesis)
    return list(found.values())[: plan.n]


def run_beam_search(
    model: GenerativeModel[Any],
    tokenizer: SupportsDecode | None,
    requests: Sequence[Request],
    *,
    beams: int,
    **how: Any,
) -> list[Result]:
    """The n best answers to requests that differ in their prompts alone; `how` is what `beam_search` takes.

    What they say of sampling is for nobody here. The search does not know of stop texts: an answer that it found ends
    before the first in it.
    """
    requests = [replace(request, sampling=Sampling(temperature=0)) for request in requests]  # draws no seeds
    results: dict[int, Result] = {}
    for tasks, batch in request_batches(model, tokenizer, requests, max(1, ROWS // max(1, beams))):
        one = tasks[0].request
        found = beam_search(model, batch, beams=beams, n=one.n, max_tokens=one.max_tokens, eos=one.stop_ids, **how)
        for task, hypotheses in zip(tasks, found, strict=True):
            results[task.id] = Result([_written(task, i, h) for i, h in enumerate(hypotheses)])
    return [results[i] for i in range(len(requests))]


def _written(task: SequenceGroup, index: int, found: Hypothesis) -> Choice:
    """A hypothesis as if the engine had said it."""
    answer = GeneratedSequence(task, index, task.tokenizer)
    said = [*found.tokens, *([] if found.end is None else [found.end])]
    for place, token in enumerate(said, 1):
        answer.take(token, None, full=place == len(said))
        if answer.finish_reason is not None:
            break
    return replace(answer.choice(index), score=found.score)
