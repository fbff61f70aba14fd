"""Beam search: at each step the few likeliest hypotheses are extended, where greedy decoding keeps one.

A hypothesis' score is its log-probability divided by length ** length_penalty, its end token counted: penalty 0
compares probabilities, 1 the mean per token, more favours longer ones. As many finished hypotheses are kept as there
are beams, and `early_stopping` says when the search ends:

    True     as soon as there are that many
    False    when the best running hypothesis, were it to end now, would not be among them: nearly always right
    "never"  when no continuation of it could be among them, however long (for penalties of 0 or more)

Diverse beam search (Vijayakumar et al. 2018) splits the beams into groups that take turns at each step; a token is
penalized by `diversity` for each time the groups before have just chosen it. The penalty is no part of a score.
Contrastive search (Su et al. 2022) is not here: it compares hidden states, which `step` does not return.

    N unfinished inputs, G groups, W running hypotheses in each (1 at first), K candidates, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.generate.batch import request_batches, unpad_tokens
from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.ngrams import NgramBlocker
from heedful.generate.request import Choice, FinishReason, Request, Result, Sampling
from heedful.generate.sequence import GeneratedSequence, SequenceGroup
from heedful.models.base import Batch, GenerativeModel

ROWS = 64  # beams of all prompts of a batch


@dataclass(frozen=True)
class Hypothesis:
    """A finished hypothesis; its end token is not among its tokens, but counts in its numbers."""

    tokens: tuple[int, ...]
    end: int | None  # the end token, None if it was cut off
    logprob: float  # of all of it
    score: float  # the same divided by length ** length_penalty

    @property
    def finish_reason(self) -> FinishReason:
        """ "stop" with an end token, else "length"."""
        return "length" if self.end is None else "stop"


@dataclass(frozen=True)
class _Options:
    """The arguments of `beam_search`, checked."""

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
class _Running:
    """A running hypothesis."""

    tokens: tuple[int, ...]
    logprob: float


# An extension: its log-probability, the index of the hypothesis that it extends, its token.
_Candidate = tuple[float, int, int]


class _Group:
    """The running hypotheses of one group of one input, best first, and the best finished ones."""

    def __init__(self, options: _Options, limit: int, prompt: Sequence[int] = (), ngram_size: int = 0) -> None:
        self.options, self.limit = options, limit  # the most tokens a hypothesis can have
        self.prompt, self.ngram_size = prompt, ngram_size  # no n-gram of this size twice; 0: any
        self.running = [_Running((), 0.0)]
        self.parents = [0]  # the index of the hypothesis that each extends
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, candidates: list[_Candidate]) -> None:
        """Keep the best candidates; there are enough of them even if all that can end do."""
        width, before = self.options.width, self.running
        length = len(before[0].tokens) + 1
        self.running, self.parents = [], []
        for rank, (logprob, parent, token) in enumerate(candidates):
            # An end token counts among the best `width` candidates alone; the others replace those that ended.
            if token in self.options.eos:
                if rank < width:
                    self._end(before[parent].tokens, token, logprob, length)
            elif len(self.running) < width:
                self.running.append(_Running((*before[parent].tokens, token), logprob))
                self.parents.append(parent)
                if rank < width and length == self.limit:
                    self._end(self.running[-1].tokens, None, logprob, length)
        self.done = self.done or self._is_finished(length)

    def _end(self, tokens: tuple[int, ...], end: int | None, logprob: float, length: int) -> None:
        if self.done or logprob == -math.inf:
            return
        self.finished.append(Hypothesis(tokens, end, logprob, self.options.score(logprob, length)))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.options.width :]

    def _is_finished(self, length: int) -> bool:
        if length == self.limit or not self.running:
            return True
        if len(self.finished) < self.options.width:
            return False
        if self.options.early_stopping is True:
            return True
        longer_is_better = self.options.early_stopping == "never" and self.options.length_penalty > 0
        best = max(hypothesis.logprob for hypothesis in self.running)
        return self.options.score(best, self.limit if longer_is_better else length) <= self.finished[-1].score


def beam_search(
    model: GenerativeModel[Any],
    batch: Batch,
    *,
    beams: int,
    max_tokens: int | Sequence[int],
    length_penalty: float = 1.0,
    n: int = 1,
    early_stopping: bool | Literal["never"] = False,
    eos: Collection[int] = frozenset(),
    never: Collection[int] = frozenset(),
    min_tokens: int = 0,
    groups: int = 1,
    diversity: float = 0.0,
    no_repeat_ngram_size: int | Sequence[int] = 0,
) -> list[list[Hypothesis]]:
    """The n best hypotheses of each row of the batch, best first; fewer where fewer were found.

    A hypothesis ends with a token of `eos` once it has `min_tokens`, at `max_tokens`, and at the model's last position.
    None has a token of `never`, nor an n-gram of `no_repeat_ngram_size` twice, a decoder's prompt included. Both limits
    may be given for each row.
    """
    ends, banned = frozenset(eos), frozenset(never)
    with torch.inference_mode():
        logits, state = model.start(batch)
        prompts = [()] * state.n_rows if batch.tokens is None else unpad_tokens(batch.tokens, batch.lengths)
        limits, sizes = _per_row(max_tokens, state.n_rows), _per_row(no_repeat_ngram_size, state.n_rows)
        options = _Options(
            beams, min(limits), length_penalty, n, early_stopping, ends, banned, min_tokens, groups, diversity
        )
        inputs = [
            [_Group(options, _limit(model, limit, length), prompt, size) for _ in range(groups)]
            for length, prompt, limit, size in zip(state.lengths, prompts, limits, sizes, strict=True)
        ]
        if groups > 1:  # they differ from the first token on
            rows = [row for row in range(state.n_rows) for _ in range(groups)]
            state.select(rows)
            logits = logits[rows]
        live = inputs
        while True:
            _advance(options, live, logits)
            rows = _rows(live, state.n_rows)
            live = [found for found in live if not _is_done(found)]
            if not live:
                return [_best(options, found) for found in inputs]
            if rows != list(range(state.n_rows)):
                state.select(rows)
            last = [b.tokens[-1] for found in live for group in found for b in group.running]
            logits = model.step(torch.tensor(last, device=logits.device), state)


def _per_row(value: int | Sequence[int], n_rows: int) -> Sequence[int]:
    return [value] * n_rows if isinstance(value, int) else value


def _limit(model: GenerativeModel[Any], max_tokens: int, n_read: int) -> int:
    """How many tokens fit after the prompt; the last one needs no position."""
    return max_tokens if model.context_length is None else min(max_tokens, model.context_length - n_read + 1)


def _is_done(groups: list[_Group]) -> bool:
    return all(group.done for group in groups)


def _rows(inputs: list[list[_Group]], n_rows: int) -> list[int]:
    """The state's row that each running hypothesis extends; a finished input has none."""
    width = n_rows // sum(len(groups) for groups in inputs)  # as it was before
    rows = []
    for i, groups in enumerate(inputs):
        for g, group in enumerate(groups):
            first = (i * len(groups) + g) * width
            rows += [] if _is_done(groups) else [first + parent for parent in group.parents]
    return rows


def _advance(options: _Options, inputs: list[list[_Group]], logits: Tensor) -> None:
    """Extend every running hypothesis by a token; logits (N·G·W, V)."""
    n_inputs, n_vocab = len(inputs), logits.shape[-1]
    precise = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.log_softmax(-1, dtype=precise).view(n_inputs, options.groups, -1, n_vocab)  # (N, G, W, V)
    ends = [token for token in options.eos if 0 <= token < n_vocab]
    banned = [token for token in options.never if 0 <= token < n_vocab]
    if len(inputs[0][0].running[0].tokens) < options.min_tokens:
        banned += ends
    if banned:
        logprobs[..., banned] = -torch.inf
    _ban_repeated_ngrams(inputs, logprobs)
    cost: Tensor | None = None
    for g in range(options.groups):
        groups = [of_input[g] for of_input in inputs]
        totals = logprobs.new_tensor([[b.logprob for b in group.running] for group in groups])  # (N, W)
        # Each hypothesis may end with every end token, and as many as before must go on.
        count = options.width * (1 + len(ends))
        candidates = _candidates(logprobs[:, g], totals, count, cost)
        for group, found in zip(groups, candidates, strict=True):
            group.advance(found)
        if options.groups > 1:
            newest = [[b.tokens[-1] for b in group.running] for group in groups]
            chosen = torch.tensor(newest, dtype=torch.long, device=logprobs.device)  # (N, W)
            cost = logprobs.new_zeros(n_inputs, n_vocab) if cost is None else cost
            cost.scatter_add_(1, chosen, cost.new_full(chosen.shape, options.diversity))


def _ban_repeated_ngrams(inputs: list[list[_Group]], logprobs: Tensor) -> None:
    """Log-probabilities (N, G, W, V), in place."""
    for i, groups in enumerate(inputs):
        for g, group in enumerate(groups):
            for w, hypothesis in enumerate(group.running if group.ngram_size else ()):
                banned = NgramBlocker(group.ngram_size, [*group.prompt, *hypothesis.tokens]).banned
                if banned:
                    logprobs[i, g, w, [token for token in banned if token < logprobs.shape[-1]]] = -torch.inf


def _candidates(logprobs: Tensor, totals: Tensor, count: int, cost: Tensor | None) -> list[list[_Candidate]]:
    """The best `count` extensions of each input, best first: by the log-probability of the hypothesis (N, W) and of the
    token (N, W, V), less the diversity penalty of the token (N, V)."""
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


def _best(options: _Options, groups: list[_Group]) -> list[Hypothesis]:
    """The best hypotheses of all groups, duplicates removed."""
    found: dict[tuple[tuple[int, ...], int | None], Hypothesis] = {}
    for hypothesis in sorted((h for group in groups for h in group.finished), key=lambda h: -h.score):
        found.setdefault((hypothesis.tokens, hypothesis.end), hypothesis)
    return list(found.values())[: options.n]


def run_beam_search(
    model: GenerativeModel[Any],
    tokenizer: SupportsDecode | None,
    requests: Sequence[Request],
    *,
    beams: int,
    **options: Any,
) -> list[Result]:
    """The n best hypotheses of requests that differ in their prompts, max_tokens and no_repeat_ngram_size alone;
    `options` are those of `beam_search`.

    Of their sampling parameters no_repeat_ngram_size alone is followed. Stop strings do not steer the search: a result
    is cut before the first one. ValueError for a grammar.
    """
    if any(request.grammar is not None for request in requests):
        raise ValueError("beam search does not follow a grammar: give beams=1")
    sizes = [request.sampling.no_repeat_ngram_size for request in requests]
    requests = [replace(request, sampling=Sampling(temperature=0)) for request in requests]  # draws no seeds
    results: dict[int, Result] = {}
    for groups, batch in request_batches(model, tokenizer, requests, max(1, ROWS // max(1, beams))):
        one = groups[0].request
        options |= {"min_tokens": one.min_tokens, "eos": one.stop_ids}
        options["max_tokens"] = [group.request.max_tokens for group in groups]
        options["no_repeat_ngram_size"] = [sizes[group.id] for group in groups]
        found = beam_search(model, batch, beams=beams, n=one.n, **options)
        for group, hypotheses in zip(groups, found, strict=True):
            results[group.id] = Result([_choice(group, i, h) for i, h in enumerate(hypotheses)])
    return [results[i] for i in range(len(requests))]


def _choice(group: SequenceGroup, index: int, found: Hypothesis) -> Choice:
    """A hypothesis as a choice, its text cut before a stop string."""
    sequence = GeneratedSequence(group, index, group.tokenizer)
    tokens = [*found.tokens, *([] if found.end is None else [found.end])]
    for place, token in enumerate(tokens, 1):
        sequence.append(token, None, full=place == len(tokens))
        if sequence.finish_reason is not None:
            break
    return replace(sequence.choice(index), score=found.score)
