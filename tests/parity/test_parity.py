"""Every family gives the reference implementation's numbers in fp32 (limits: 1e-5; greedy ids: equal)."""

import pytest

from support import measure
from support.families import CASES

LIMIT = 1e-5
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
speaking = pytest.mark.parametrize("case", [c for c in CASES if c.generates], ids=lambda c: c.name)
exported = pytest.mark.parametrize("case", [c for c in CASES if c.exports], ids=lambda c: c.name)


@every
def test_logits(case):
    assert measure.logits(case) < LIMIT


@every
def test_loss(case):
    assert measure.loss(case) < LIMIT


@every
def test_gradients(case):
    assert measure.gradients(case) < LIMIT


@speaking
def test_greedy_ids(case):
    assert measure.greedy_ids(case) == 0


@speaking
def test_cached_equals_uncached(case):
    assert measure.cached(case) < LIMIT


@exported
def test_round_trip(case):
    assert measure.round_trip(case) < LIMIT
