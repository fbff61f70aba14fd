"""Intervals and paired tests against scipy's and sacrebleu's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest as TheirPairedTest
from scipy import stats

from heedful.evaluate.bootstrap import (
    Metric,
    interval,
    mcnemar,
    mean_metric,
    paired_test,
    resampled_counts,
    value_of,
)
from heedful.evaluate.classification import calibration_error
from heedful.evaluate.similarity import spearman
from heedful.evaluate.translation import Translation

RANDOM = np.random.default_rng(5)


def test_resamples_draw_as_many_items_as_there_are():
    counts = np.concatenate(list(resampled_counts(40, 500)))
    assert counts.shape == (500, 40) and (counts.sum(axis=1) == 40).all()
    assert counts.mean() == 1 and counts.var() == pytest.approx(1 - 1 / 40, rel=0.05)
    again = np.concatenate(list(resampled_counts(40, 500)))
    assert (counts == again).all()


def test_the_interval_is_scipys():
    scores = RANDOM.random(200)
    low, high = interval(mean_metric("x", scores.tolist()), 200, 4000)
    theirs = stats.bootstrap((100 * scores,), np.mean, method="percentile", n_resamples=4000, random_state=1)
    assert (low, high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.3)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 12), (40, 41), (700, 600)])
def test_mcnemar_is_the_exact_binomial_test(gained, lost):
    first = np.array([False] * gained + [True] * lost + [True, False])
    other = np.array([True] * gained + [False] * lost + [True, False])
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(first, other) == pytest.approx(expected)


def test_paired_tests():
    first, noise = RANDOM.random(300) < 0.6, RANDOM.random(300)
    better, same = first | (noise < 0.3), first ^ (noise < 0.1)
    a, b, c = (mean_metric("accuracy", x.astype(float).tolist()) for x in (first, better, same))
    found = paired_test(a, b, 300)
    assert found.difference == pytest.approx(100 * (better.mean() - first.mean()))
    assert 0 < found.low < found.difference < found.high and found.p < 0.01 and found.mcnemar < 0.01
    assert paired_test(a, c, 300).p > 0.05 and paired_test(a, a, 300).p == 1 == paired_test(a, a, 300).mcnemar
    perplexity = Metric("perplexity", lambda counts: counts @ noise, "")
    assert paired_test(perplexity, perplexity, 300).mcnemar is None


def test_bleu_and_its_paired_test_are_sacrebleus():
    words = "a man in the red car rides fast past two dogs near an old house".split()
    right = [" ".join(RANDOM.choice(words, 9)) for _ in range(60)]
    good, bad = ([" ".join(w if RANDOM.random() > p else "x" for w in t.split()) for t in right] for p in (0.2, 0.45))
    metrics = [
        Translation().metrics([{"prediction": p, "reference": r} for p, r in zip(said, right, strict=True)])[0]
        for said in (bad, good)
    ]
    for metric, said in zip(metrics, (bad, good), strict=True):
        assert value_of(metric, 60) == BLEU().corpus_score(said, [right]).score
    ours = paired_test(*metrics, 60)
    _, theirs = TheirPairedTest([("bad", bad), ("good", good)], {"BLEU": BLEU(references=[right])}, None, "bs", 1000)()
    assert ours.p == pytest.approx(theirs["BLEU"][1].p_value, abs=0.002)
    low, high = interval(metrics[1], 60)
    assert (high - low) / 2 == pytest.approx(theirs["BLEU"][1].ci, rel=0.15)


def test_spearman_is_scipys_in_every_resample():
    said, right = RANDOM.random(50).round(1), RANDOM.random(50).round(1)
    counts = next(iter(resampled_counts(50, 20)))
    found = spearman(said, right)(counts)
    for row, value in zip(counts.astype(int), found, strict=True):
        assert value == pytest.approx(100 * stats.spearmanr(said.repeat(row), right.repeat(row)).statistic)


def test_the_calibration_error_is_its_definition():
    p, right = RANDOM.random(400), RANDOM.random(400) < 0.5
    edges, expected = np.linspace(0, 1, 16), 0.0
    for low, high in pairwise(edges):  # Guo et al. 2017, equation 3
        chosen = (p > low) & (p <= high)
        expected += chosen.sum() / 400 * abs(right[chosen].mean() - p[chosen].mean())
    assert calibration_error(p, right.astype(float))(np.ones((1, 400)))[0] == pytest.approx(100 * expected)
