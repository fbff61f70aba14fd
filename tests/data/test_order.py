"""The order of examples: every one once an epoch, entered anywhere at the same price."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data import order
from heedful.data.dataset import Draw
from heedful.data.order import Order, Permutation

few = settings(deadline=None, max_examples=50)


@pytest.fixture
def no_lists(monkeypatch):
    """Permutations as they are beyond a million examples, for fewer."""
    monkeypatch.setattr(order, "LISTED", 0)


@few
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), listed=st.booleans())
def test_a_permutation_has_every_number_once(n, seed, listed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "LISTED", n if listed else 0)
        found = Permutation(n, seed)(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))


def test_a_permutation_of_a_billion_has_no_number_twice():
    found = Permutation(10**9 + 7, 5)(np.arange(200_000) * 5000)
    assert len(np.unique(found)) == len(found)
    assert 0 <= found.min() and found.max() < 10**9 + 7
    assert np.histogram(found, bins=100, range=(0, 10**9 + 7))[0].std() < 2 * np.sqrt(2000)


def test_computed_permutations_look_random(no_lists):
    """Neighbours end up anywhere, and no place prefers a number: chi-squared within four deviations."""
    n, trials = 30, 6000
    counts = np.zeros((n, n))
    for key in range(trials):
        counts[np.arange(n), Permutation(n, key)(np.arange(n))] += 1
    expected = trials / n
    assert ((counts - expected) ** 2 / expected).sum() < (n - 1) ** 2 + 4 * np.sqrt(2 * (n - 1) ** 2)
    steps = np.diff(Permutation(5000, 1)(np.arange(5000)))
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.05  # -1/2 for independent places


@few
@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 100),
    with_lengths=st.booleans(),
    shuffle=st.booleans(),
)
def test_epochs_follow_each_other_and_have_every_example_once(n, batch_size, seed, with_lengths, shuffle):
    lengths = np.random.default_rng(seed).integers(1, 9, size=n) if with_lengths else None
    ordered = Order(n, batch_size, seed, lengths, shuffle)
    draws = [draw for step in range(3 * n // batch_size + 1) for draw in ordered(step)]
    for epoch in range(3):
        part = draws[epoch * n : (epoch + 1) * n]
        assert {draw.epoch for draw in part} == {epoch}
        assert sorted(draw.index for draw in part) == list(range(n))


def test_seeds_and_epochs_differ():
    rows = {tuple(draw.index for draw in Order(100, 100, seed)(epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(rows) == 4
    assert Order(10, 4, 1, shuffle=False)(2) == [Draw(0, 8), Draw(0, 9), Draw(1, 0), Draw(1, 1)]


def test_the_order_is_the_same_for_ever():
    """A run goes on after an upgrade as it began: these numbers must not change."""
    assert [draw.index for draw in Order(10, 10, 1)(0)] == [2, 0, 1, 4, 5, 6, 7, 8, 3, 9]
    assert Permutation(2**40, 1)(np.arange(3)).tolist() == [339768418772, 731788535186, 640824651242]


def test_batches_have_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, size=10_000)
    plain, sorted_ = Order(10_000, 16, 1), Order(10_000, 16, 1, lengths)

    def padding(ordered):
        batches = [lengths[[draw.index for draw in ordered(step)]] for step in range(600)]
        return sum(len(batch) * batch.max() - batch.sum() for batch in batches) / sum(map(np.sum, batches))

    assert padding(plain) > 0.8
    assert padding(sorted_) < 0.03
    means = [lengths[[draw.index for draw in sorted_(step)]].mean() for step in range(64)]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.4  # short and long batches in no order


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("with_lengths", [True, False])
def test_the_millionth_step_costs_no_more_than_the_tenth(monkeypatch, listed, with_lengths):
    """Counted are all random numbers drawn and all places looked up."""
    monkeypatch.setattr(order, "LISTED", 10**6 if listed else 0)
    work = []
    bits, call = order.random_bits, Permutation.__call__
    monkeypatch.setattr(order, "random_bits", lambda n, *key: work.append(n) or bits(n, *key))
    monkeypatch.setattr(Permutation, "__call__", lambda self, p: work.append(len(p)) or call(self, p))
    costs = []
    for step in (10, 10**6, 10**9):
        work.clear()
        Order(5000, 50, 1, np.arange(5000) if with_lengths else None)(step)
        costs.append(sum(work))
    assert costs[0] == costs[1] == costs[2]
    if not listed and not with_lengths:
        assert costs[0] < 100  # and a single step needs no epoch


@pytest.mark.parametrize("n, batch_size, lengths", [(0, 1, None), (3, 0, None), (3, 1, np.ones(2))])
def test_impossible_orders(n, batch_size, lengths):
    with pytest.raises(ValueError):
        Order(n, batch_size, 1, lengths)
