"""Who is read, who speaks, who waits: first come, first served, within bounds on rows, memory and tokens per step.

Nothing here knows of models. A job needs rows (one per answer) and memory (tokens that its rows may come to remember)
from when its prompt begins to be read until it ends, and takes both in advance: what has begun can always go on.
A step reads at most `chunk` tokens of prompts, so that a long prompt does not keep those that speak waiting; only the
last job of a step may read more, if it cannot be divided there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
    @property
    def exact(
        self,
    ) -> bool: ...  # its parts are the same whatever else is read, for the last bit of its scores


J = TypeVar("J", bound=Job)
T = TypeVar("T")


class Scheduler(Generic[J]):
    """`begin`, if given, is called with each job before its prompt is read: it may turn out that less is left."""

    def __init__(
        self,
        max_rows: int,
        chunk: int,
        max_size: int | None = None,
        begin: Callable[[J], None] | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("chunk", chunk), ("cache_tokens", max_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        self.max_rows, self.chunk, self.max_size, self.begin = max_rows, chunk, max_size, begin
        self.waiting: deque[J] = deque()
        self.active: list[J] = []  # being read or speaking, in the order they came

    def add(self, job: J) -> None:
        """Put a job at the end of the line; ValueError if it could never run."""
        self.check(job.n_rows, job.size)
        self.waiting.append(job)

    def check(self, n_rows: int, size: int) -> None:
        """ValueError if a job of so many rows and tokens could never run; from any thread."""
        if n_rows > self.max_rows:
            raise ValueError(f"{n_rows} answers at once do not fit into max_rows {self.max_rows}: ask for fewer")
        if self.max_size is not None and size > self.max_size:
            raise ValueError(
                f"the prompt and max_tokens may need {size} tokens of memory, and cache_tokens is "
                f"{self.max_size}: ask for fewer"
            )

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
            if self.begin is not None:
                self.begin(job)
            pieces.append((job, self._piece(job, budget)))
            budget -= pieces[-1][1]
        return pieces

    def _piece(self, job: J, budget: int) -> int:
        return job.n_left if job.whole else min(job.n_left, self.chunk if job.exact else budget)

    def _fits(self, job: J) -> bool:
        rows = sum(j.n_rows for j in self.active) + job.n_rows
        size = sum(j.size for j in self.active) + job.size
        return rows <= self.max_rows and (self.max_size is None or size <= self.max_size)


def bucket_by_length(jobs: Sequence[T], size: Callable[[T], int]) -> list[list[T]]:
    """Jobs in groups to be read side by side: padded to the largest, no group is more than half padding."""
    groups: list[list[T]] = []
    for job in sorted(jobs, key=size, reverse=True):
        if not groups or 2 * size(job) < size(groups[-1][0]):
            groups.append([])
        groups[-1].append(job)
    return groups
