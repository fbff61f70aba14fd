"""Batches for training: every example once an epoch, the same on any number of processes and workers."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data import loader
from heedful.data.dataset import Draw
from heedful.data.loader import BatchLoader, BatchSampler, Permutation, validation_batches
from support.numbers import Numbers

few = settings(deadline=None, max_examples=50)


@pytest.fixture
def no_lists(monkeypatch):
    """Permutations as they are beyond a million examples, for fewer."""
    monkeypatch.setattr(loader, "LISTED", 0)


@few
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), listed=st.booleans())
def test_a_permutation_has_every_number_once(n, seed, listed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "LISTED", n if listed else 0)
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
    ordered = BatchSampler(n, batch_size, seed, lengths, shuffle)
    draws = [draw for step in range(3 * n // batch_size + 1) for draw in ordered(step)]
    for epoch in range(3):
        part = draws[epoch * n : (epoch + 1) * n]
        assert {draw.epoch for draw in part} == {epoch}
        assert sorted(draw.index for draw in part) == list(range(n))


def test_seeds_and_epochs_differ():
    rows = {tuple(draw.index for draw in BatchSampler(100, 100, seed)(epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(rows) == 4
    assert BatchSampler(10, 4, 1, shuffle=False)(2) == [Draw(0, 8), Draw(0, 9), Draw(1, 0), Draw(1, 1)]


def test_the_order_is_the_same_for_ever():
    """A run goes on after an upgrade as it began: these numbers must not change."""
    assert [draw.index for draw in BatchSampler(10, 10, 1)(0)] == [2, 0, 1, 4, 5, 6, 7, 8, 3, 9]
    assert Permutation(2**40, 1)(np.arange(3)).tolist() == [339768418772, 731788535186, 640824651242]


def test_batches_have_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, size=10_000)
    plain, sorted_ = BatchSampler(10_000, 16, 1), BatchSampler(10_000, 16, 1, lengths)

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
    monkeypatch.setattr(loader, "LISTED", 10**6 if listed else 0)
    work = []
    bits, call = loader.random_bits, Permutation.__call__
    monkeypatch.setattr(loader, "random_bits", lambda n, *key: work.append(n) or bits(n, *key))
    monkeypatch.setattr(Permutation, "__call__", lambda self, p: work.append(len(p)) or call(self, p))
    costs = []
    for step in (10, 10**6, 10**9):
        work.clear()
        BatchSampler(5000, 50, 1, np.arange(5000) if with_lengths else None)(step)
        costs.append(sum(work))
    assert costs[0] == costs[1] == costs[2]
    if not listed and not with_lengths:
        assert costs[0] < 100  # and a single step needs no epoch


@pytest.mark.parametrize("n, batch_size, lengths", [(0, 1, None), (3, 0, None), (3, 1, np.ones(2))])
def test_impossible_orders(n, batch_size, lengths):
    with pytest.raises(ValueError):
        BatchSampler(n, batch_size, 1, lengths)


# --- the loader -------------------------------------------------------------------------------------------------------


def rows(batches):
    return [tuple(row) for batch in batches for row in batch.ids.tolist()]


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("heedful-loader")]


@pytest.mark.parametrize("lengths", [None, np.arange(50) % 7])
@pytest.mark.parametrize("world_size, accumulate", [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3)])
def test_processes_together_read_what_one_reads(world_size, accumulate, lengths):
    data = Numbers(50, lengths)
    for step in (0, 3, 4, 10**6):
        whole = rows(BatchLoader(data, batch_size=14, seed=3).step(step))
        parts = [
            BatchLoader(data, batch_size=14, seed=3, accumulate=accumulate, rank=rank, world_size=world_size).step(step)
            for rank in range(world_size)
        ]
        assert rows(itertools.chain(*parts)) == whole
        assert {len(part) for part in parts} == {accumulate}
        sizes = [len(batch.ids) for part in parts for batch in part]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_prefetched_steps_are_the_same_steps(workers):
    data = Numbers(20)
    loading = BatchLoader(data, batch_size=6, seed=1, accumulate=2, workers=workers)
    expected = [rows(loading.step(step)) for step in range(5, 30)]
    data.asked.clear()
    assert [rows(batches) for batches in loading.steps(5, 30)] == expected
    assert all(name.startswith("heedful-loader") == (workers > 0) for name in data.asked)
    assert list(loading.steps(7, 7)) == []
    assert not loader_threads()


def test_workers_are_only_a_little_ahead():
    data = Numbers(1000)
    steps = BatchLoader(data, batch_size=1, seed=1, workers=1).steps(0, 500)
    next(steps)
    steps.close()
    assert len(data.asked) <= 4
    assert not loader_threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_in_a_worker_fails_in_the_caller(workers):
    class Broken(Numbers):
        def batch(self, draws, seed):
            if draws[0].index == 7:
                raise ValueError("line 7 of the file is damaged")
            return super().batch(draws, seed)

    seen = []
    with pytest.raises(ValueError, match="line 7"):
        for batches in BatchLoader(Broken(10), batch_size=1, seed=1, workers=workers).steps(0, 10):
            seen += rows(batches)
    expected = rows(itertools.chain(*(BatchLoader(Numbers(10), batch_size=1, seed=1).step(s) for s in range(10))))
    assert seen == expected[: [index for _, index, _ in expected].index(7)]  # all before it arrived
    assert not loader_threads()


@pytest.mark.parametrize("ending", ["pass", "signal.raise_signal(signal.SIGINT)"])
def test_a_program_ends_with_a_loader_half_read(ending):
    code = f"""
import signal, torch
from heedful.data.loader import BatchLoader
from heedful.models.base import Batch
class Data:
    lengths, fingerprint = None, ""
    def __len__(self): return 100
    def batch(self, draws, seed): return Batch(torch.ones(1, 1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
steps = BatchLoader(Data(), batch_size=1, seed=1, workers=2).steps(0, 10**9)
next(steps)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (ending == "pass")
    assert "Exception ignored" not in done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (ending != "pass")


@pytest.mark.parametrize(
    "options, match",
    [
        ({"batch_size": 5, "world_size": 2, "accumulate": 3}, "batch_size to 6 or more"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"batch_size": 4, "workers": -1}, "workers=-1"),
    ],
)
def test_impossible_settings(options, match):
    with pytest.raises(ValueError, match=match):
        BatchLoader(Numbers(10), seed=1, **options)


def test_validation_reads_everything_once():
    data = Numbers(10)
    assert [batch.ids[:, 1].tolist() for batch in validation_batches(data, batch_size=4, seed=1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    both = [validation_batches(data, batch_size=4, seed=1, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(index for _, index, _ in rows(itertools.chain(*both))) == list(range(10))
    some = [batch.ids[0, 1].item() for batch in validation_batches(Numbers(1000), batch_size=10, seed=1, n_batches=5)]
    assert some == [0, 200, 400, 600, 800]
    by_length = Numbers(6, np.array([3, 1, 2, 3, 1, 2]))
    assert [batch.ids[:, 1].tolist() for batch in validation_batches(by_length, batch_size=2, seed=1)] == [
        [1, 4],
        [2, 5],
        [0, 3],
    ]


def test_a_draw_has_its_own_random_numbers():
    assert Draw(1, 2).random(3).random() == Draw(1, 2).random(3).random()
    assert len({Draw(e, i).random(s).random() for e in (0, 1) for i in (0, 1) for s in (0, 1)}) == 8
