"""Choosing the next token: logit processors (bias and penalties), temperature, then filters, then one random draw.

Each rule is a small pure function from logits to logits. They act in the order of transformers: logit bias, repetition
penalty, frequency and presence penalty, repeated n-grams and minimum length, the grammar, temperature, top-k, top-p,
min-p, typical; each filter sees the distribution that the one before left. Ties at the border: top-k and min-p look at
a token's own logit only and keep all that equal the last one kept; top-p and typical keep the fewest tokens, of equals
those with the lowest ids.

A row never depends on the others. It has a random stream of its own, seeded by the seed and the sequence's index, and
takes the same count of numbers from it for every token. An id is drawn bit by bit, the highest first: one number per
bit, compared with the share of the probability on either side. Logits differ in their last bits with the batch they are
computed in, and inverting the cumulative distribution with a single number would not forgive that: a sum that is 1e-6
off carries it past any token less likely than that, and a vocabulary has tens of thousands of those. Bit by bit, an
error changes a choice only where a number lies that near to the border of its own two halves: with noise of 1e-5 on
50,257 logits of a Zipf-like distribution 3 of 100,000 choices against 1,600 by a single number.

The vocabulary is never sorted as a whole: see heedful/kernels/sampling.py.

    B rows, V vocabulary, M a part of it
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from heedful.generate.matcher import GrammarFailed, Matcher, allowed_tokens
from heedful.generate.ngrams import NgramBlocker
from heedful.generate.request import Sampling, TokenScore
from heedful.kernels.cuda.device_sampling import PARAMETERS
from heedful.kernels.sampling import (
    SORTED_FIRST,
    apply_temperature,
    argmax,
    keep_smallest_set,
    mask_tokens,
    n_uniforms,
    sample_categorical,
    sample_top_p,
    top_candidates,
)
from heedful.models.vocabulary import check_token_ids
from heedful.nn.dtype import widest_float

if TYPE_CHECKING:
    from heedful.kernels.cuda.graphs import ChosenTokens


class InvalidLogits(ValueError):
    """No token can be chosen from these rows (NaN, inf or all -inf). Raised before any sampler has advanced."""

    def __init__(self, rows: list[int], highest: list[float]) -> None:
        self.rows = rows
        found = ", ".join(f"row {row} (highest: {top})" for row, top in zip(rows, highest, strict=True))
        super().__init__(f"logits must be finite or -inf, and not all -inf: {found}")


class Sampler:
    """The sampling state of one sequence: its parameters, its random stream, and the tokens that penalties count.

    `stop_ids` are not sampled before `min_tokens` others were, nor anything that the `matcher` of a grammar refuses,
    which comes first where both leave no token.
    """

    def __init__(
        self,
        params: Sampling,
        prompt: Sequence[int] = (),
        index: int = 0,
        *,
        min_tokens: int = 0,
        stop_ids: Collection[int] = frozenset(),
        matcher: Matcher | None = None,
    ) -> None:
        self.params, self.matcher = params, matcher
        self._n_missing, self._stop_ids = min_tokens, sorted(stop_ids)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.penalizes = penalties != (1, 0, 0)
        self._ngrams = NgramBlocker(params.no_repeat_ngram_size, prompt) if params.no_repeat_ngram_size else None
        # Only the repetition penalty counts the prompt's tokens; the others count generated ones alone.
        prompt_ids = dict.fromkeys(prompt if params.repetition_penalty != 1 else ())
        self._ids = array("q", prompt_ids)  # each token once
        self._counts = array("q", [0] * len(prompt_ids))  # how often it was generated
        self._slots = {token: slot for slot, token in enumerate(prompt_ids)}
        if params.temperature > 0:
            # Without a seed torch's global state gives one. NumPy's streams, since torch's CPU generator reads
            # only 32 bits of a seed; spawn keys keep (seed, index) pairs apart.
            seed = int(torch.randint(2**63 - 1, ())) if params.seed is None else params.seed % 2**64
            stream = np.random.SeedSequence(seed, spawn_key=(index,))
            self._random = np.random.Generator(np.random.PCG64(stream))
        self._peeked: deque[list[float]] = deque()
        defaults, names = type(params)(), {field.name for field in dataclasses.fields(params)} - PARAMETERS
        self._host_only = any(getattr(params, name) != getattr(defaults, name) for name in names)

    def uniforms(self, n: int) -> list[float]:
        """The next n numbers of the random stream, uniform in [0, 1)."""
        return self._peeked.popleft() if self._peeked else self._random.random(n).tolist()

    def peek_uniforms(self, n: int, ahead: int = 0) -> list[float]:
        """What `uniforms` will give after it was called `ahead` times more, always with this n."""
        while len(self._peeked) <= ahead:
            self._peeked.append(self._random.random(n).tolist())
        return self._peeked[ahead]

    def record(self, token: int) -> None:
        """Count a generated token. `sample` does it; callers do it for tokens that were chosen otherwise."""
        self._n_missing -= 1
        if self.matcher is not None:
            self.matcher.accept(token)
        if self._ngrams is not None:
            self._ngrams.append(token)
        if self.penalizes:
            slot = self._slots.setdefault(token, len(self._ids))
            if slot == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[slot] += 1

    @property
    def banned(self) -> list[int]:
        """The tokens that may not be next: stop tokens of a sequence that is too short, ends of repeated n-grams."""
        short = self._stop_ids if self._n_missing > 0 else []
        return short if self._ngrams is None else [*short, *self._ngrams.banned]

    @property
    def constrained(self) -> bool:
        """Whether a grammar decides which tokens may be next."""
        return self.matcher is not None and not self.matcher.complete

    @property
    def needs_host(self) -> bool:
        """Whether the host must sample the next token: for a grammar, banned tokens, or a parameter that sampling on a
        device does not know."""
        return bool(self.constrained or self._host_only or self.banned)

    @property
    def changes_logits(self) -> bool:
        """Whether it changes the model's logits before temperature and filters, now or later."""
        return bool(self.penalizes or self.params.logit_bias or self.needs_host)

    def counts(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The ids that penalties apply to, and how often each was generated."""
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)


# --- logit processors ------------------------------------------------------------------------------------------------


def penalize_repetition(logits: Tensor, penalty: Tensor | float) -> Tensor:
    """Lower the logits of tokens seen before (Keskar et al. 2019, section 4.1; negative ones are multiplied)."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def penalize_counts(logits: Tensor, counts: Tensor, frequency: Tensor | float, presence: Tensor | float) -> Tensor:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts generated tokens (OpenAI's API reference)."""
    return logits - counts * frequency - (counts > 0) * presence


def apply_penalties(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """The logits (B, V) in fp32 with each row's bias, penalties, banned tokens and grammar."""
    biased = [row for row, sampler in enumerate(samplers) if sampler.params.logit_bias]
    penalized = [row for row, sampler in enumerate(samplers) if sampler.penalizes]
    constrained = [row for row, sampler in enumerate(samplers) if sampler.constrained]
    free = (row for row in range(len(samplers)) if row not in constrained)
    banned = {row: tokens for row in free if (tokens := samplers[row].banned)}
    if not (biased or penalized or banned or constrained):
        return logits.float()
    logits = logits.to(torch.float32, copy=True)
    n_tokens, device = logits.shape[-1], logits.device
    for row in biased:
        bias = samplers[row].params.logit_bias
        check_token_ids(list(bias), n_tokens, "logit_bias")
        ids = torch.tensor(list(bias), device=device)
        logits[row, ids] += torch.tensor(list(bias.values()), device=device, dtype=torch.float32)
    if penalized:
        found = [samplers[row].counts() for row in penalized]
        ids, counts = (torch.from_numpy(np.concatenate(part)).to(device) for part in zip(*found, strict=True))
        params = [samplers[row].params for row in penalized]
        table = torch.tensor([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params])
        lengths = torch.tensor([len(part) for part, _ in found])
        rows = torch.tensor(penalized).repeat_interleave(lengths).to(device)
        factors = table.repeat_interleave(lengths, 0).to(device)
        known = ids < n_tokens  # the input vocabulary may be larger than the output vocabulary
        rows, ids, counts, factors = rows[known], ids[known], counts[known], factors[known]
        at = penalize_repetition(logits[rows, ids], factors[:, 0])
        logits[rows, ids] = penalize_counts(at, counts, factors[:, 1], factors[:, 2])
    for row, tokens in banned.items():
        logits[row, [token for token in tokens if token < n_tokens]] = -torch.inf
    if constrained:
        mask_tokens(logits, constrained, _allowed(constrained, samplers, n_tokens))
    return logits


def _allowed(rows: Sequence[int], samplers: Sequence[Sampler], n_tokens: int) -> Tensor:
    """The bits of the tokens that the grammars of these rows allow: (rows, words)."""
    chosen = [samplers[row] for row in rows]
    matchers = [sampler.matcher for sampler in chosen if sampler.matcher is not None]
    try:
        allowed = allowed_tokens(matchers, n_tokens, [sampler.banned for sampler in chosen])
    except GrammarFailed as error:
        raise GrammarFailed([rows[i] for i in error.rows], str(error)) from None
    return torch.from_numpy(allowed.view(np.int32))


# --- filters: (..., V) -> (..., V), with -inf at what is removed -----------------------------------------------------


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k most likely tokens, and those as likely as the last of them (Fan et al. 2018)."""
    _, highest = top_candidates(logits.reshape(-1, logits.shape[-1]), k)
    least = highest.topk(min(k, highest.shape[-1])).values[:, -1]
    return logits.masked_fill(logits < least.view(*logits.shape[:-1], 1), -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest tokens that together have probability p, one at least (nucleus; Holtzman et al. 2020)."""
    return keep_smallest_set(logits, logits, logits.softmax(-1), p)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """The tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < share * probabilities.amax(-1, keepdim=True), -torch.inf)


def keep_typical(logits: Tensor, mass: float) -> Tensor:
    """The fewest tokens with this mass whose surprisal is nearest to the entropy (Meister et al. 2023)."""
    logs = logits.log_softmax(-1)
    probabilities = logits.softmax(-1)
    # 0 · -inf is 0 here; in double precision the order of the sum, which depends on the batch, leaves no trace
    entropy = -(logs * probabilities).nansum(-1, keepdim=True, dtype=torch.float64).to(logs.dtype)
    return keep_smallest_set(logits, -(logs + entropy).abs(), probabilities, mass)


def filter_logits(logits: Tensor, params: Sampling) -> Tensor:
    """All filters that the parameters ask for, in their order."""
    if params.top_k is not None:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    if params.min_p > 0:
        logits = keep_min_p(logits, params.min_p)
    if params.typical_p < 1:
        logits = keep_typical(logits, params.typical_p)
    return logits


# --- sampling --------------------------------------------------------------------------------------------------------


def to_sampling_device(logits: Tensor) -> Tensor:
    """The logits where tokens are sampled from them: on their own device, or on the CPU if it has no float64."""
    return logits if widest_float(logits.device) == torch.float64 else logits.cpu()


@torch.no_grad()
def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """One token for each row (B, V), recorded by its sampler. Rows with the same parameters are sampled together."""
    assert len(logits) == len(samplers), "one sampler per row"
    if not samplers:
        return []
    logits = apply_penalties(to_sampling_device(logits), samplers)
    highest, tokens = argmax(logits)
    wrong = [row for row, top in enumerate(highest) if not math.isfinite(top)]
    if wrong:
        raise InvalidLogits(wrong, [highest[row] for row in wrong])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, sampler in enumerate(samplers):
        p = sampler.params
        if p.temperature > 0:
            groups.setdefault((p.temperature, p.top_k, p.top_p, p.min_p, p.typical_p), []).append(row)
    for rows in groups.values():
        part = logits if len(rows) == len(samplers) else logits[rows]
        maxima = [highest[row] for row in rows]
        for row, token in zip(rows, _sample_group(part, maxima, [samplers[row] for row in rows]), strict=True):
            tokens[row] = token
    for sampler, token in zip(samplers, tokens, strict=True):
        sampler.record(token)
    return tokens


def _sample_group(logits: Tensor, maxima: Sequence[float], samplers: Sequence[Sampler]) -> list[int]:
    """A random token for each row; the rows have the same temperature and filters."""
    params = samplers[0].params
    n_tokens, ids = logits.shape[-1], None
    uniforms = [sampler.uniforms(n_uniforms(n_tokens)) for sampler in samplers]
    if (params.top_k, params.min_p, params.typical_p) == (None, 0, 1):
        return sample_top_p(logits, maxima, params.temperature, params.top_p, uniforms)
    if params.top_k is not None and params.top_k <= 16 * SORTED_FIRST < n_tokens:
        # What top-k leaves is all that the other filters see. Its width depends on the rows: keep_typical on double.
        ids, logits = top_candidates(logits, params.top_k)
        logits = logits.double()
    return sample_categorical(filter_logits(apply_temperature(logits, params.temperature), params), uniforms, ids)


@torch.no_grad()
def token_scores(logits: Tensor, tokens: Sequence[int], n_top: Sequence[int | None]) -> list[TokenScore | None]:
    """The model's own log-probability of each row's token, logits (B, V), and of the n_top likeliest tokens.

    None for rows whose n_top is None.
    """
    wanted = [row for row, n in enumerate(n_top) if n is not None]
    found: list[TokenScore | None] = [None] * len(n_top)
    if not wanted:
        return found
    logs = (logits if len(wanted) == len(logits) else logits[wanted]).float().log_softmax(-1)
    ids = torch.tensor([tokens[row] for row in wanted], device=logs.device)
    own = logs.gather(1, ids[:, None])[:, 0].tolist()
    most = max(n for n in n_top if n is not None)
    values, top_ids = logs.topk(min(most, logs.shape[-1]))
    for row, logprob, top, at in zip(wanted, own, values.tolist(), top_ids.tolist(), strict=True):
        found[row] = TokenScore(tokens[row], logprob, tuple(zip(at, top, strict=True))[: n_top[row]])
    return found


def score_chosen(chosen: ChosenTokens, n_top: Sequence[int | None]) -> list[TokenScore | None]:
    """`token_scores` of tokens that were sampled on the device."""
    return [
        None if n is None else TokenScore(chosen.tokens[row], chosen.logprobs[row], tuple(chosen.top[row][:n]))
        for row, n in enumerate(n_top)
    ]
