"""Who is admitted, and how much of each prompt a step reads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from heedful.generate.pace import PrefillPace
from heedful.generate.scheduler import Scheduler, bucket_by_length
from heedful.generate.turns import Owner

numbers = count()


@dataclass(eq=False)
class Job:
    n_left: int
    n_rows: int = 1
    n_prefilled: int = 0
    cache_tokens: int = 10
    atomic: bool = False
    fixed_chunks: bool = False
    n_tokens: int = 3  # to say
    held_tokens: int = 0
    preemptible: bool = False
    owner: Owner = field(default_factory=lambda: Owner("client", next(numbers)))


def read(scheduler: Scheduler[Job]) -> list[int]:
    """Do what the plan says; how many tokens of each job."""
    plan = scheduler.schedule()
    for job, n in plan:
        job.n_left, job.n_prefilled = job.n_left - n, job.n_prefilled + n
    return [n for _, n in plan]


def test_long_prompts_are_read_in_parts_the_shortest_first():
    scheduler = Scheduler(max_rows=4, chunk=10)
    for n in (25, 3, 4, 30):
        scheduler.add(Job(n))
    assert [read(scheduler) for _ in range(7)] == [[3, 2, 5], [2, 8], [10], [2, 8], [10], [10], [2]]
    assert read(scheduler) == []


def test_a_short_prompt_does_not_wait_and_a_long_one_does_not_starve():
    for n in 40, 90:  # shorter prompts come in every step: some of it, and all of it and more
        scheduler = Scheduler(max_rows=1000, chunk=100)
        scheduler.add(long := Job(1000))
        steps = 0
        while long.n_left:
            read(scheduler)
            scheduler.add(short := Job(n))
            read(scheduler)
            assert n == 90 or not short.n_left
            steps += 2
        assert steps <= 1000 / 50


def test_what_cannot_be_divided_is_read_at_once():
    scheduler = Scheduler(max_rows=4, chunk=10)
    scheduler.add(Job(25, atomic=True))
    scheduler.add(Job(3))
    assert read(scheduler) == [3, 25]


def test_what_is_scored_is_divided_the_same_whoever_else_is_read():
    scheduler = Scheduler(max_rows=4, chunk=10)
    for job in (Job(7), Job(25, fixed_chunks=True), Job(4, fixed_chunks=True)):
        scheduler.add(job)
    assert [read(scheduler) for _ in range(5)] == [[4, 6], [1, 10], [10], [5], []]


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
    assert set(map(id, came)) == set(map(id, jobs)) and not scheduler.running and not scheduler.waiting


def test_a_steps_cost_is_bounded_however_long_the_prompt_has_become():
    pace = PrefillPace(per_key=0.01)
    scheduler = Scheduler(max_rows=4, chunk=1000, pace=pace)
    job = Job(5000)
    scheduler.add(job)
    sizes = []
    while job.n_left:
        at = job.n_prefilled
        ((_, n),) = scheduler.schedule(cost=1000)
        assert pace.cost(at, n) <= 1000
        job.n_left, job.n_prefilled = job.n_left - n, at + n
        sizes.append(n)
    assert sizes[0] == pace.fitting(0, 1000) == 358 and sizes[:-1] == sorted(sizes[:-1], reverse=True)


def test_the_pace_is_learned():
    pace = PrefillPace(step_time=10.0)
    first = pace.budget(decoding=False)
    for _ in range(20):
        pace.record(200, 2)
    assert pace.budget(decoding=False) == pytest.approx(1000) and first < 1000
    pace.record(1, 1)  # a short prompt takes what reading the weights takes
    assert pace.budget(decoding=False) > 950


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
