"""First come, first served, within bounds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from heedful.generate.scheduler import Scheduler, bucket_by_length


@dataclass(eq=False)
class Job:
    n_left: int
    n_rows: int = 1
    cache_tokens: int = 10
    atomic: bool = False
    fixed_chunks: bool = False
    n_tokens: int = 3  # to say


def read(scheduler: Scheduler[Job]) -> list[int]:
    """Do what the plan says; how many tokens of each job."""
    plan = scheduler.schedule()
    for job, n in plan:
        job.n_left -= n
    return [n for _, n in plan]


def test_long_prompts_are_read_in_parts_and_in_order():
    scheduler = Scheduler(max_rows=4, chunk=10)
    for n in (25, 3, 4, 30):
        scheduler.add(Job(n))
    assert [read(scheduler) for _ in range(8)] == [[10], [10], [5, 3, 2], [2, 8], [10], [10], [2], []]


def test_what_cannot_be_divided_is_read_at_once():
    scheduler = Scheduler(max_rows=4, chunk=10)
    scheduler.add(Job(25, atomic=True))
    scheduler.add(Job(3))
    assert [read(scheduler) for _ in range(2)] == [[25], [3]]


def test_what_is_scored_is_divided_the_same_whoever_else_is_read():
    scheduler = Scheduler(max_rows=4, chunk=10)
    for job in (Job(7), Job(25, fixed_chunks=True), Job(4, fixed_chunks=True)):
        scheduler.add(job)
    assert [read(scheduler) for _ in range(4)] == [[7, 10], [10], [5, 4], []]


def test_nobody_overtakes():
    scheduler = Scheduler(max_rows=4, chunk=100)
    first, wide, small = Job(1, n_rows=2), Job(1, n_rows=3), Job(1)
    for job in (first, wide, small):
        scheduler.add(job)
    assert read(scheduler) == [1] and list(scheduler.waiting) == [wide, small]
    scheduler.remove(first)
    assert read(scheduler) == [1, 1] and scheduler.running == [wide, small]


def test_memory_is_bounded():
    scheduler = Scheduler(max_rows=10, chunk=100, max_cache_tokens=25)
    jobs = [Job(1) for _ in range(4)]
    for job in jobs:
        scheduler.add(job)
    assert read(scheduler) == [1, 1]
    scheduler.remove(jobs[3])  # one that waits
    scheduler.remove(jobs[0])
    assert read(scheduler) == [1] and not scheduler.waiting


def test_what_can_never_run_is_refused():
    scheduler = Scheduler(max_rows=2, chunk=10, max_cache_tokens=20)
    with pytest.raises(ValueError, match=r"3 .*max_rows 2"):
        scheduler.add(Job(1, n_rows=3))
    with pytest.raises(ValueError, match=r"21 .*cache_tokens is 20"):
        scheduler.add(Job(1, cache_tokens=21))
    for wrong in ({"max_rows": 0, "chunk": 1}, {"max_rows": 1, "chunk": 0}):
        with pytest.raises(ValueError, match="1 or more"):
            Scheduler(**wrong)


def test_everyone_is_served_and_the_bounds_hold():
    chance = random.Random(0)
    scheduler = Scheduler(max_rows=5, chunk=16, max_cache_tokens=60)
    jobs = [Job(chance.randint(1, 40), chance.randint(1, 3), chance.randint(1, 60)) for _ in range(200)]
    came = []
    coming = list(jobs)
    for _ in range(5000):
        if coming and chance.random() < 0.5:
            scheduler.add(coming.pop(0))
        before = list(scheduler.running)
        assert sum(read(scheduler)) <= 16
        came += [job for job in scheduler.running if job not in before]
        assert sum(job.n_rows for job in scheduler.running) <= 5
        assert sum(job.cache_tokens for job in scheduler.running) <= 60
        for job in [job for job in scheduler.running if not job.n_left]:
            job.n_tokens -= 1
            if not job.n_tokens:
                scheduler.remove(job)
    assert came == jobs and not scheduler.running and not scheduler.waiting


def test_groups_are_at_most_half_padding():
    chance = random.Random(0)
    jobs = [Job(chance.randint(1, 300)) for _ in range(100)]
    groups = bucket_by_length(jobs, lambda j: j.n_left)
    assert sorted(id(j) for g in groups for j in g) == sorted(map(id, jobs))
    assert len(groups) < 12
    for group in groups:
        assert len(group) * group[0].n_left <= 2 * sum(j.n_left for j in group)
        assert group[0].n_left == max(j.n_left for j in group)
    assert bucket_by_length([], len) == []
