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


# --- a server's: shares, turns, preemption ----------------------------------------------------------------------------


def serving(cache_tokens: int = 6400, max_rows: int = 16, chunk: int = 1000) -> Scheduler[Job]:
    return Scheduler(max_rows=max_rows, chunk=chunk, max_cache_tokens=cache_tokens, short_share=0.25)


def long_job(n: int = 1000, more: int = 600, **changes) -> Job:
    return Job(n, cache_tokens=n + more, held_tokens=n + 1, preemptible=True, **changes)


def short_job(n: int = 20, **changes) -> Job:
    return Job(n, cache_tokens=n + 16, held_tokens=n + 1, preemptible=True, **changes)


def check_bounds(scheduler: Scheduler[Job]) -> None:
    assert sum(job.n_rows for job in scheduler.running) <= scheduler.max_rows
    held = sum(job.held_tokens if job.preemptible else job.cache_tokens for job in scheduler.running)
    assert held <= scheduler.max_cache_tokens


def test_a_short_request_is_admitted_in_the_next_step_though_the_cache_is_full_of_long_ones():
    scheduler = serving()
    for _ in range(8):
        scheduler.add(long_job())
    for _ in range(5):
        read(scheduler)
    n_long = len(scheduler.running)
    assert n_long == 4 and len(scheduler.waiting) == 4  # three quarters of 6400, each with room for its next tokens
    for _ in range(50):
        scheduler.add(short := short_job())
        read(scheduler)
        assert short in scheduler.running and not short.n_left
        check_bounds(scheduler)
        scheduler.remove(short)
    assert len(scheduler.running) == n_long


def test_long_requests_leave_rows_to_short_ones():
    scheduler = serving(cache_tokens=1_000_000, max_rows=16)
    for _ in range(30):
        scheduler.add(long_job(n=40_000))
    while read(scheduler):
        pass
    assert len(scheduler.running) == 12
    for _ in range(6):
        scheduler.add(short_job())
    read(scheduler)
    assert len(scheduler.running) == 16


@pytest.mark.parametrize("need", [1600, 6400])  # as much as others, and all that there is
def test_a_long_request_is_not_starved_by_short_ones(need):
    scheduler = serving(max_rows=8)
    for _ in range(3):
        scheduler.add(long_job())
    read(scheduler)
    scheduler.add(wanted := Job(1000, cache_tokens=need, held_tokens=1001))
    steps = 0
    while wanted not in scheduler.running:
        for _ in range(20):
            scheduler.add(Job(150, cache_tokens=166, held_tokens=151, preemptible=True))
        read(scheduler)
        check_bounds(scheduler)
        for job in [job for job in scheduler.running if not job.n_left and job is not wanted][:3]:
            scheduler.remove(job)  # three end in each step
        steps += 1
        assert steps < 100


def test_the_longest_is_preempted_when_the_cache_is_full_and_once_only():
    scheduler = serving()
    jobs = [long_job(n, 2500) for n in (900, 1300, 1000)]
    for job in jobs:
        scheduler.add(job)
    while read(scheduler):
        pass
    assert set(scheduler.running) == set(jobs) and not scheduler.preempt()
    jobs[0].held_tokens += 1700  # the answers grow beyond three quarters of 6400
    assert scheduler.preempt() == [jobs[0]] and jobs[0] not in scheduler.running
    assert scheduler.n_preempted == 1 and next(iter(scheduler.waiting)) is jobs[0]
    jobs[0].preemptible, jobs[0].n_left = False, jobs[0].held_tokens
    scheduler.add(another := long_job(500))
    for _ in range(3):
        read(scheduler)
    assert jobs[0] not in scheduler.running and another not in scheduler.running  # it is not overtaken any more
    scheduler.remove(jobs[1])
    read(scheduler)
    assert jobs[0] in scheduler.running
    jobs[2].held_tokens += 500
    assert scheduler.preempt() == [jobs[2]]
    check_bounds(scheduler)


def test_clients_take_turns_and_so_do_their_submissions():
    scheduler = Scheduler(max_rows=1, chunk=10)
    many, single, other = Owner("a", 1), Owner("a", 2), Owner("b", 3)
    jobs = [Job(1, owner=owner) for owner in [many] * 6 + [single] + [other] * 3]
    for job in jobs:
        scheduler.add(job)
    order = []
    while scheduler.waiting:
        read(scheduler)
        (job,) = scheduler.running
        order.append(job.owner)
        scheduler.remove(job)
    assert order == [many, other, single, other, many, other, many, many, many, many]


def test_a_submission_of_thousands_leaves_rows_to_others():
    scheduler = serving(cache_tokens=100_000, max_rows=64)
    many = Owner("a", 1)
    for _ in range(2000):
        scheduler.add(short_job(owner=many))
    read(scheduler)
    read(scheduler)
    assert len(scheduler.running) == 48
    for _ in range(20):
        scheduler.add(one := short_job())
        read(scheduler)
        assert one in scheduler.running  # at once
        scheduler.remove(one)
    another = Owner("b", 2)
    for _ in range(2000):
        scheduler.add(short_job(owner=another))
    for _ in range(400):
        for job in scheduler.running[:4]:
            scheduler.remove(job)
        read(scheduler)
    rows = {owner: sum(job.owner == owner for job in scheduler.running) for owner in (many, another)}
    assert abs(rows[many] - rows[another]) <= 8 and 64 - len(scheduler.running) >= 4


def test_everyone_is_served_by_a_server_and_the_bounds_hold():
    chance = random.Random(0)
    scheduler = serving(cache_tokens=640, max_rows=6, chunk=64)
    coming, done = [], 0
    for i in range(300):
        n = chance.choice([3, 10, 30, 200])
        owner = Owner(i % 3, chance.choice([i, i // 20]))
        n_rows = chance.choice([1, 1, 1, 3 if n < 200 else 1])
        need = n_rows * (n + 15)
        coming.append(Job(n, n_rows, cache_tokens=need, held_tokens=n + 1, preemptible=n_rows == 1, owner=owner))
    for job in coming:
        job.n_tokens = 12
    total, steps = len(coming), 0
    while done < total:
        steps += 1
        assert steps < 20_000
        if coming and chance.random() < 0.3:
            scheduler.add(coming.pop(0))
        for job in scheduler.preempt():
            job.preemptible, job.n_left, job.n_prefilled = False, job.held_tokens, 0
        read(scheduler)
        check_bounds(scheduler)
        for job in [job for job in scheduler.running if not job.n_left]:
            job.n_tokens, job.held_tokens = job.n_tokens - 1, job.held_tokens + 1
            if not job.n_tokens:
                scheduler.remove(job)
                done += 1
    assert not scheduler.running and not scheduler.waiting and not scheduler._overtaken
