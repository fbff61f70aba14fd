"""Every family gives the reference implementation's numbers in fp32 (limits: 1e-5; greedy ids: equal), on the plain
and on the accelerated paths."""

import pytest

from support import measure
from support.families import CASES

LIMIT = 1e-5


def on(*paths, cases=CASES):
    """Every case on these paths, except where there is nothing to accelerate."""
    found = [(case, path) for case in cases for path in paths if path == "plain" or case.accelerates]
    return pytest.mark.parametrize("case, path", found, ids=[f"{case.name}-{path}" for case, path in found])


SPEAKING = [c for c in CASES if c.generates]
exported = pytest.mark.parametrize("case", [c for c in CASES if c.exports], ids=lambda c: c.name)


@on("plain", "inference")
def test_logits(case, path):
    assert measure.logits(case, path) < LIMIT


@on("plain", "inference", "training")
def test_loss(case, path):
    assert measure.loss(case, path) < LIMIT


@on("plain", "training")
def test_gradients(case, path):
    assert measure.gradients(case, path) < LIMIT


@on("plain", "inference", cases=SPEAKING)
def test_greedy_ids(case, path):
    assert measure.greedy_ids(case, path) == 0


@on("plain", "inference", cases=SPEAKING)
def test_cached_equals_uncached(case, path):
    assert measure.cached(case, path) < LIMIT


@exported
def test_round_trip(case):
    assert measure.round_trip(case) < LIMIT
