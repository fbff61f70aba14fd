"""Who is read, who speaks, who waits: first come, first served, within bounds on rows, memory and tokens per step.

Nothing here knows of models. A job needs rows (one per answer) and memory (tokens that its rows may come to remember)
from when its prompt begins to be read until it ends, and takes both in advance: what has begun can always go on.
A step reads at most `chunk` tokens of prompts, so that a long prompt does not keep those that speak waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def n_left(self) -> int: ...  # tokens of its prompt still to be read
    @property
    def n_rows(self) -> int: ...
    @property
    def size(self) -> int: ...  # tokens all its rows may come to remember
    @property
    def whole(self) -> bool: ...  # its prompt cannot be read in parts (an encoder sees all of its source)


J = TypeVar("J", bound=Job)


class Scheduler(Generic[J]):
    def __init__(self, max_rows: int, chunk: int, max_size: int | None = None) -> None:
        for name, value in (("max_rows", max_rows), ("chunk", chunk), ("cache_tokens", max_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        self.max_rows, self.chunk, self.max_size = max_rows, chunk, max_size
        self.waiting: deque[J] = deque()
        self.active: list[J] = []  # being read or speaking, in the order they came

    def add(self, job: J) -> None:
        """Put a job at the end of the line; ValueError if it could never run."""
        if job.n_rows > self.max_rows:
            raise ValueError(
                f"{job.n_rows} answers at once do not fit into max_rows {self.max_rows}: ask for fewer"
            )
        if self.max_size is not None and job.size > self.max_size:
            raise ValueError(
                f"the prompt and max_tokens may need {job.size} tokens of memory, and cache_tokens is "
                f"{self.max_size}: ask for fewer"
            )
        self.waiting.append(job)

    def remove(self, job: J) -> None:
        """A job has ended, in whatever way."""
        if job in self.active:
            self.active.remove(job)
        else:
            self.waiting.remove(job)

    def plan(self) -> list[tuple[J, int]]:
        """What to read in this step: jobs, and how many tokens of each one's prompt."""
        pieces: list[tuple[J, int]] = []
        budget = self.chunk
        for job in self.active:
            if job.n_left and budget > 0:
                pieces.append((job, self._piece(job, budget)))
                budget -= pieces[-1][1]
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            job = self.waiting.popleft()
            self.active.append(job)
            pieces.append((job, self._piece(job, budget)))
            budget -= pieces[-1][1]
        return pieces

    @staticmethod
    def _piece(job: J, budget: int) -> int:
        return job.n_left if job.whole else min(job.n_left, budget)

    def _fits(self, job: J) -> bool:
        rows = sum(j.n_rows for j in self.active) + job.n_rows
        size = sum(j.size for j in self.active) + job.size
        return rows <= self.max_rows and (self.max_size is None or size <= self.max_size)


def alike(jobs: Sequence[J]) -> list[list[J]]:
    """Jobs in groups to be read side by side: padded to the longest, no group is more than half padding."""
    groups: list[list[J]] = []
    for job in sorted(jobs, key=lambda j: -j.n_left):
        if not groups or 2 * job.n_left < groups[-1][0].n_left:
            groups.append([])
        groups[-1].append(job)
    return groups
