"""Choosing the next token: penalties and bias on the model's logits, then temperature, then cuts, then one draw.

Each rule is a small pure function from logits to logits. They act in the order of transformers: logit bias, repetition
penalty, frequency and presence penalty, temperature, top-k, top-p, min-p, typical; each cut sees the distribution that
the one before left. Equals at the border: top-k and min-p look at a token's own logit only and keep all that equal the
last one kept; top-p and typical keep the fewest tokens, of equals those with the lowest ids.

A row never depends on the others. It has a random stream of its own, from the seed and the answer's index, and takes
the same count of numbers from it for every token. An id is drawn bit by bit, the highest first: one number per bit,
against the share of the probability on either side. Logits differ in their last bits with the batch they are computed
in, and a single number on the cumulated distribution would not forgive that: a sum that is 1e-6 off carries it past
any token less likely than that, and a vocabulary has tens of thousands of those. Bit by bit, an error changes a choice
only where a number lies that near to the border of its own two halves: with noise of 1e-5 on 50,257 logits of a
Zipf-like distribution 3 of 100,000 choices against 1,600 by a single number.

The vocabulary is never sorted as a whole: see select.py.

B rows, V vocabulary, M a part of it
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.generate.request import Sampling, TokenScore
from heedful.generate.select import FEW, bits_of, draw, draw_heated, fewest, highest_of, leading
from heedful.kernels.cpu.sampling import supports_logits


class InvalidLogits(ValueError):
    """No token can be chosen from these rows. Raised before any row has moved on."""

    def __init__(self, rows: list[int], highest: list[float]) -> None:
        self.rows = rows
        found = ", ".join(f"row {row} (highest: {top})" for row, top in zip(rows, highest, strict=True))
        super().__init__(f"logits must be finite or -inf, and not all -inf: {found}")


class Sampler:
    """What one answer needs to go on: its settings, its random stream, and what has been said."""

    def __init__(self, how: Sampling, prompt: Sequence[int] = (), index: int = 0) -> None:
        self.how = how
        self.penalizes = (how.repetition_penalty, how.frequency_penalty, how.presence_penalty) != (1, 0, 0)
        # The other penalties are for what was said, not for what was asked.
        asked = dict.fromkeys(prompt if how.repetition_penalty != 1 else ())
        self._ids = array("q", asked)  # each token once
        self._counts = array("q", [0] * len(asked))  # how often it was said
        self._places = {token: place for place, token in enumerate(asked)}
        if how.temperature > 0:
            # Without a seed torch's global state gives one. NumPy's streams, since torch's CPU generator reads
            # only 32 bits of a seed; spawn keys keep (seed, index) pairs apart.
            seed = int(torch.randint(2**63 - 1, ())) if how.seed is None else how.seed % 2**64
            stream = np.random.SeedSequence(seed, spawn_key=(index,))
            self._random = np.random.Generator(np.random.PCG64(stream))

    def numbers(self, n: int) -> list[float]:
        """The next n numbers of the stream, uniform in [0, 1)."""
        return self._random.random(n).tolist()

    def say(self, token: int) -> None:
        """Remember a token of the answer. `sample` does it; a caller does it for tokens that came otherwise."""
        if self.penalizes:
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1

    def said(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """All tokens that penalties look at, and how often each was said."""
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)


# Penalties: of the logits at the tokens they concern, or of all.


def penalize_repetition(logits: Tensor, penalty: Tensor | float) -> Tensor:
    """Lowers the logits of tokens seen before (Keskar et al. 2019, section 4.1; negative ones are multiplied)."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def penalize_counts(logits: Tensor, counts: Tensor, frequency: Tensor | float, presence: Tensor | float) -> Tensor:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts what was said (OpenAI's API reference)."""
    return logits - counts * frequency - (counts > 0) * presence


def apply_penalties(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """The logits in fp32 with each row's bias and penalties, applied only at the tokens they concern."""
    biased = [row for row, sampler in enumerate(samplers) if sampler.how.logit_bias]
    heard = [row for row, sampler in enumerate(samplers) if sampler.penalizes]
    if not biased and not heard:
        return logits.float()
    logits = logits.to(torch.float32, copy=True)
    n_tokens, device = logits.shape[-1], logits.device
    for row in biased:
        bias = samplers[row].how.logit_bias
        if max(bias) >= n_tokens:
            raise ValueError(f"logit_bias of token {max(bias)}: the vocabulary ends at {n_tokens - 1}")
        ids = torch.tensor(list(bias), device=device)
        logits[row, ids] += torch.tensor(list(bias.values()), device=device, dtype=torch.float32)
    if heard:
        said = [samplers[row].said() for row in heard]
        ids, counts = (torch.from_numpy(np.concatenate(part)).to(device) for part in zip(*said, strict=True))
        hows = [samplers[row].how for row in heard]
        table = torch.tensor([[h.repetition_penalty, h.frequency_penalty, h.presence_penalty] for h in hows])
        lengths = torch.tensor([len(part) for part, _ in said])
        rows = torch.tensor(heard).repeat_interleave(lengths).to(device)
        factors = table.repeat_interleave(lengths, 0).to(device)
        known = ids < n_tokens  # a model may read tokens that it cannot say
        rows, ids, counts, factors = rows[known], ids[known], counts[known], factors[known]
        at = penalize_repetition(logits[rows, ids], factors[:, 0])
        logits[rows, ids] = penalize_counts(at, counts, factors[:, 1], factors[:, 2])
    return logits


# Temperature and cuts: (..., V) -> (..., V), with -inf at what is cut.


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, the highest at 0 so that none overflows however cold it is."""
    return (logits - logits.amax(-1, keepdim=True)).div_(max(temperature, 1e-30))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k most likely tokens, and those as likely as the last of them (Fan et al. 2018)."""
    _, highest = leading(logits.reshape(-1, logits.shape[-1]), k)
    least = highest.topk(min(k, highest.shape[-1])).values[:, -1]
    return logits.masked_fill(logits < least.view(*logits.shape[:-1], 1), -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest tokens that together have probability p, one at least (nucleus; Holtzman et al. 2020)."""
    return _keep_fewest(logits, logits, logits.softmax(-1), p)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """The tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < share * probabilities.amax(-1, keepdim=True), -torch.inf)


def keep_typical(logits: Tensor, mass: float) -> Tensor:
    """The fewest tokens with this mass whose surprise is nearest to the expected one (Meister et al. 2023)."""
    logs = logits.log_softmax(-1)
    probabilities = logits.softmax(-1)
    # 0 · -inf is 0 here; in double precision the order of the sum, which depends on the batch, leaves no trace
    entropy = -(logs * probabilities).nansum(-1, keepdim=True, dtype=torch.float64).to(logs.dtype)
    return _keep_fewest(logits, -(logs + entropy).abs(), probabilities, mass)


def filter_logits(logits: Tensor, how: Sampling) -> Tensor:
    """All cuts that are asked for, in their order."""
    if how.top_k is not None:
        logits = keep_top_k(logits, how.top_k)
    if how.top_p < 1:
        logits = keep_top_p(logits, how.top_p)
    if how.min_p > 0:
        logits = keep_min_p(logits, how.min_p)
    if how.typical_p < 1:
        logits = keep_typical(logits, how.typical_p)
    return logits


def _keep_fewest(logits: Tensor, key: Tensor, probabilities: Tensor, mass: float) -> Tensor:
    shape = (-1, logits.shape[-1])
    kept = fewest(key.reshape(shape), probabilities.reshape(shape), mass)
    return logits.masked_fill(~kept.view_as(logits), -torch.inf)


@torch.no_grad()
def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """One token for each row (B, V), remembered by its sampler. Rows with the same settings are done together."""
    assert len(logits) == len(samplers), "one sampler per row"
    if not samplers:
        return []
    logits = apply_penalties(logits, samplers)
    highest, likeliest = highest_of(logits)
    wrong = [row for row, top in enumerate(highest) if not math.isfinite(top)]
    if wrong:
        raise InvalidLogits(wrong, [highest[row] for row in wrong])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, sampler in enumerate(samplers):
        how = sampler.how
        cuts = (how.temperature, how.top_k, how.top_p, how.min_p, how.typical_p)
        if how.temperature > 0:
            groups.setdefault(cuts, []).append(row)
    tokens = likeliest
    for rows in groups.values():
        part = logits if len(rows) == len(samplers) else logits[rows]
        tops = [highest[row] for row in rows]
        for row, token in zip(rows, _choose(part, tops, [samplers[row] for row in rows]), strict=True):
            tokens[row] = token
    for sampler, token in zip(samplers, tokens, strict=True):
        sampler.say(token)
    return tokens


def _choose(logits: Tensor, highest: Sequence[float], samplers: Sequence[Sampler]) -> list[int]:
    """A token for each row by chance; the rows have the same temperature and cuts."""
    how = samplers[0].how
    n_tokens, places = logits.shape[-1], None
    numbers = [sampler.numbers(bits_of(n_tokens)) for sampler in samplers]
    if (how.top_k, how.min_p, how.typical_p) == (None, 0, 1) and supports_logits(logits):
        return draw_heated(logits, highest, how.temperature, how.top_p, numbers)
    if how.top_k is not None and how.top_k <= 16 * FEW < n_tokens:
        # What top-k leaves is all that the other cuts see. Its width depends on the rows; see keep_typical for double.
        places, logits = leading(logits, how.top_k)
        logits = logits.double()
    return draw(filter_logits(apply_temperature(logits, how.temperature), how), numbers, places)


@torch.no_grad()
def token_scores(logits: Tensor, tokens: Sequence[int], n_top: Sequence[int | None]) -> list[TokenScore | None]:
    """What the model itself thinks of the tokens, one per row (B, V), and of its own favourites; None: not asked."""
    asked = [row for row, n in enumerate(n_top) if n is not None]
    found: list[TokenScore | None] = [None] * len(n_top)
    if not asked:
        return found
    logs = (logits if len(asked) == len(logits) else logits[asked]).float().log_softmax(-1)
    ids = torch.tensor([tokens[row] for row in asked], device=logs.device)
    own = logs.gather(1, ids[:, None])[:, 0].tolist()
    most = max(n for n in n_top if n is not None)
    values, places = logs.topk(min(most, logs.shape[-1]))
    for row, logprob, top, at in zip(asked, own, values.tolist(), places.tolist(), strict=True):
        found[row] = TokenScore(tokens[row], logprob, tuple(zip(at, top, strict=True))[: n_top[row]])
    return found
