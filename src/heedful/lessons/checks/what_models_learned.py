"""The exercises of the lesson on what models learned: association scores, and a bootstrap interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from heedful.lessons.checking import require, require_close, require_tensor


def check_association(answer: Callable[..., Any]) -> None:
    """The mean log-probability of the chosen sentences less that of all."""
    generator = torch.Generator().manual_seed(11)
    logprobs = torch.randn(6, 9, generator=generator).log_softmax(dim=-1)
    chosen = [True, False, True, False, False, False]
    made = require_tensor(answer(logprobs.clone(), list(chosen)), (9,))
    these, rest = logprobs[[0, 2]].mean(dim=0), logprobs[[1, 3, 4, 5]].mean(dim=0)

    def near(other: torch.Tensor) -> bool:
        return bool((made - other).abs().max() < 1e-5)

    require(not near(these), "that is the mean over the chosen sentences alone: subtract the mean over all")
    require(not near(these - rest), "that is against the other sentences: the comparison is with the mean over all")
    require(not near(logprobs.mean(dim=0) - these), "the sign is wrong: chosen less all")
    log_of_mean = logprobs[[0, 2]].exp().mean(dim=0).log() - logprobs.exp().mean(dim=0).log()
    require(not near(log_of_mean), "that is the logarithm of mean probabilities: take the mean of the logarithms")
    require_close(made, these - logprobs.mean(dim=0), "it is not the chosen sentences' mean less the mean over all")


def check_bootstrap_interval(answer: Callable[..., Any]) -> None:
    """The percentiles of resampled means, of size N and with replacement."""
    values = torch.randn(40, generator=torch.Generator().manual_seed(12), dtype=torch.float64) * 3 + 5
    made = answer(values.clone(), 4000, torch.Generator().manual_seed(1))
    require(isinstance(made, tuple | list) and len(made) == 2, "return two numbers, low and high")
    low, high = (float(x) for x in made)
    require(low <= high, f"low is {low:.2f} and high {high:.2f}: the 2.5th percentile comes first")
    require(high - low > 1e-6, "low and high are the same: each resample draws with replacement, and so differs")
    mean, error = float(values.mean()), float(values.std(unbiased=False)) / len(values) ** 0.5
    width = (high - low) / (2 * 1.96 * error)  # 1 for the means of N draws
    require(
        width < 4,
        "the interval is as wide as the values are spread: it is that of the means of resamples, not of values",
    )
    require(not 0.78 < width < 0.9, "it is too narrow: from 5 to 95 percent is a 90 % interval")
    require(
        abs(width - 1) < 0.08,
        f"the interval is {width:.1f} times as wide as it should be: draw N values, with replacement",
    )
    require(abs((low + high) / 2 - mean) < 0.2 * error, "the interval is not around the mean")
    other = answer(values.clone(), 4000, torch.Generator().manual_seed(1))
    require(
        (low, high) == tuple(float(x) for x in other),
        "the same generator gives another interval: use `generator` to draw",
    )
