"""Confidence intervals and paired tests by the bootstrap over items (Efron 1979; Koehn 2004 for translations).

A metric is a function of how often each item of a test set counts: once each for its value, a random number of times
in a resample. Metrics of sums (accuracy, F1, BLEU, perplexity) cost one matrix product for many resamples.

    N items, R resamples
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
SEED = 0  # the same items give the same interval
LARGEST_PART = 2**21  # counts in memory at a time


@dataclass(frozen=True)
class Metric:
    """A metric of N items: `values` maps counts (R, N) to (R,) values."""

    name: str
    values: Callable[[np.ndarray], np.ndarray]
    unit: str = "%"
    higher_is_better: bool = True
    right: np.ndarray | None = None  # (N,) which items are right, where the metric is their share


@dataclass(frozen=True)
class PairedTest:
    """The difference of a metric between two models on the same items, its 95 % interval, and p-values."""

    metric: str
    difference: float
    low: float
    high: float
    p: float  # of no difference, by the paired bootstrap
    mcnemar: float | None = None  # exact, for shares of right items


def mean_metric(name: str, scores: Sequence[float]) -> Metric:
    """The mean of items' scores (0 to 1) in percent; for scores of 0 and 1 alone, the share that is right."""
    found = np.asarray(scores, dtype=float)
    right = found == 1 if np.isin(found, (0, 1)).all() else None
    return Metric(name, lambda counts: 100 * (counts @ found) / counts.sum(axis=1), right=right)


def value_of(metric: Metric, n: int) -> float:
    """The metric of all items."""
    return float(metric.values(np.ones((1, n)))[0])


def interval(metric: Metric, n: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % confidence interval: percentiles of the metric over resamples of the items."""
    return _percentiles(np.concatenate([metric.values(counts) for counts in resampled_counts(n, resamples)]))


def resampled_counts(n: int, resamples: int, seed: int = SEED) -> Iterator[np.ndarray]:
    """How often each of n items is drawn, n times with replacement: (R, N), a part of the resamples at a time."""
    random = np.random.default_rng(seed)
    part = max(1, LARGEST_PART // n)
    for begin in range(0, resamples, part):
        rows = min(part, resamples - begin)
        drawn = random.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(float)


def paired_test(first: Metric, other: Metric, n: int, resamples: int = RESAMPLES) -> PairedTest:
    """How `other` differs from `first`: both are resampled alike. The p-value is how often a resampled difference is as
    far from the measured one as that is from none, either way."""
    parts = [other.values(counts) - first.values(counts) for counts in resampled_counts(n, resamples)]
    differences = np.concatenate(parts)
    measured = value_of(other, n) - value_of(first, n)
    as_far = int((np.abs(differences - measured) >= abs(measured)).sum())
    exact = None if first.right is None or other.right is None else mcnemar(first.right, other.right)
    return PairedTest(first.name, measured, *_percentiles(differences), (as_far + 1) / (resamples + 1), exact)


def mcnemar(first: np.ndarray, other: np.ndarray) -> float:
    """The two-sided p-value of McNemar's exact test (1947): of the items that one model alone has right, each has half
    of them by chance."""
    gained, lost = int((other & ~first).sum()), int((first & ~other).sum())
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values[~np.isnan(values)], [2.5, 97.5]) if not np.isnan(values).all() else (np.nan,) * 2
    return float(low), float(high)
