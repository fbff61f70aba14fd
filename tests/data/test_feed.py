"""Batches for a trainer: the same on any number of processes and workers, and failures are heard of."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest

from heedful.data.dataset import Draw
from heedful.data.feed import Feed, once
from support.numbers import Numbers


def rows(batches):
    return [tuple(row) for batch in batches for row in batch.ids.tolist()]


def feeder_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("heedful-feed")]


@pytest.mark.parametrize("lengths", [None, np.arange(50) % 7])
@pytest.mark.parametrize("world, accumulate", [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3)])
def test_processes_together_read_what_one_reads(world, accumulate, lengths):
    data = Numbers(50, lengths)
    for step in (0, 3, 4, 10**6):
        whole = rows(Feed(data, batch_size=14, seed=3).step(step))
        parts = [
            Feed(data, batch_size=14, seed=3, accumulate=accumulate, rank=rank, world=world).step(step)
            for rank in range(world)
        ]
        assert rows(itertools.chain(*parts)) == whole
        assert {len(part) for part in parts} == {accumulate}
        sizes = [len(batch.ids) for part in parts for batch in part]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_prefetched_steps_are_the_same_steps(workers):
    data = Numbers(20)
    feed = Feed(data, batch_size=6, seed=1, accumulate=2, workers=workers)
    expected = [rows(feed.step(step)) for step in range(5, 30)]
    data.asked.clear()
    assert [rows(batches) for batches in feed.steps(5, 30)] == expected
    assert all(name.startswith("heedful-feed") == (workers > 0) for name in data.asked)
    assert list(feed.steps(7, 7)) == []
    assert not feeder_threads()


def test_workers_are_only_a_little_ahead():
    data = Numbers(1000)
    steps = Feed(data, batch_size=1, seed=1, workers=1).steps(0, 500)
    next(steps)
    steps.close()
    assert len(data.asked) <= 4
    assert not feeder_threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_in_a_worker_fails_in_the_caller(workers):
    class Broken(Numbers):
        def batch(self, draws, seed):
            if draws[0].index == 7:
                raise ValueError("line 7 of the file is damaged")
            return super().batch(draws, seed)

    seen = []
    with pytest.raises(ValueError, match="line 7"):
        for batches in Feed(Broken(10), batch_size=1, seed=1, workers=workers).steps(0, 10):
            seen += rows(batches)
    expected = rows(itertools.chain(*(Feed(Numbers(10), batch_size=1, seed=1).step(s) for s in range(10))))
    assert seen == expected[: [index for _, index, _ in expected].index(7)]  # all before it arrived
    assert not feeder_threads()


@pytest.mark.parametrize("ending", ["pass", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
def test_a_program_ends_with_a_feed_half_read(ending):
    code = f"""
import torch
from heedful.data.feed import Feed
from heedful.models.base import Batch
class Data:
    lengths, fingerprint = None, ""
    def __len__(self): return 100
    def batch(self, draws, seed): return Batch(torch.ones(1, 1))
steps = Feed(Data(), batch_size=1, seed=1, workers=2).steps(0, 10**9)
next(steps)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (ending == "pass")
    assert ("KeyboardInterrupt" in done.stderr) == (ending != "pass")


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"batch_size": 5, "world": 2, "accumulate": 3}, "batch_size to 6 or more"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"batch_size": 4, "workers": -1}, "workers=-1"),
    ],
)
def test_impossible_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        Feed(Numbers(10), seed=1, **settings)


def test_validation_reads_everything_once():
    data = Numbers(10)
    assert [batch.ids[:, 1].tolist() for batch in once(data, batch_size=4, seed=1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    both = [once(data, batch_size=4, seed=1, rank=rank, world=2) for rank in range(2)]
    assert sorted(index for _, index, _ in rows(itertools.chain(*both))) == list(range(10))
    some = [batch.ids[0, 1].item() for batch in once(Numbers(1000), batch_size=10, seed=1, n_batches=5)]
    assert some == [0, 200, 400, 600, 800]
    by_length = Numbers(6, np.array([3, 1, 2, 3, 1, 2]))
    assert [batch.ids[:, 1].tolist() for batch in once(by_length, batch_size=2, seed=1)] == [
        [1, 4],
        [2, 5],
        [0, 3],
    ]


def test_a_draw_has_its_own_random_numbers():
    assert Draw(1, 2).random(3).random() == Draw(1, 2).random(3).random()
    assert len({Draw(e, i).random(s).random() for e in (0, 1) for i in (0, 1) for s in (0, 1)}) == 8
