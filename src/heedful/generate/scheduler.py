"""The scheduler of continuous batching: which requests are admitted, and how much of each prompt a step prefills.

First come, first served, within bounds on rows, KV-cache tokens and prompt tokens per step. It knows nothing of models.
A request reserves its rows (one per sequence) and its cache tokens when it is admitted, for as long as it runs, so a
running request is never preempted. A step prefills at most `chunk` prompt tokens, so that a long prompt does not stall
those that decode (chunked prefill); only the last request of a step may go beyond, if it cannot be divided there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def n_left(self) -> int:
        """Prompt tokens that are not prefilled yet."""
        ...

    @property
    def n_rows(self) -> int:
        """Sequences that it decodes."""
        ...

    @property
    def cache_tokens(self) -> int:
        """Tokens that all its rows may come to keep in the KV cache."""
        ...

    @property
    def atomic(self) -> bool:
        """Whether its prompt cannot be prefilled in chunks (an encoder sees all of its source)."""
        ...

    @property
    def fixed_chunks(self) -> bool:
        """Whether its chunks must not depend on other requests, so that its scores are the same to the last bit."""
        ...


J = TypeVar("J", bound=Job)
T = TypeVar("T")


class Scheduler(Generic[J]):
    """The waiting queue and the running requests. `on_admit` is called with each request before its first prefill,
    where a prefix cache may shorten what is left of its prompt."""

    def __init__(
        self,
        max_rows: int,
        chunk: int,
        max_cache_tokens: int | None = None,
        on_admit: Callable[[J], None] | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("chunk", chunk), ("cache_tokens", max_cache_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        self.max_rows, self.chunk, self.max_cache_tokens, self.on_admit = max_rows, chunk, max_cache_tokens, on_admit
        self.waiting: deque[J] = deque()
        self.running: list[J] = []  # in prefill or decoding, in the order of their arrival

    def add(self, job: J) -> None:
        """Append a request to the waiting queue; ValueError if it could never run."""
        self.check(job.n_rows, job.cache_tokens)
        self.waiting.append(job)

    def check(self, n_rows: int, cache_tokens: int) -> None:
        """ValueError if a request of so many rows and cache tokens could never run; thread-safe."""
        if n_rows > self.max_rows:
            raise ValueError(f"{n_rows} answers at once do not fit into max_rows {self.max_rows}: ask for fewer")
        if self.max_cache_tokens is not None and cache_tokens > self.max_cache_tokens:
            raise ValueError(
                f"the prompt and max_tokens may need {cache_tokens} tokens of memory, and cache_tokens is "
                f"{self.max_cache_tokens}: ask for fewer"
            )

    def remove(self, job: J) -> None:
        """Drop a request that has finished, failed or been cancelled."""
        if job in self.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)

    def schedule(self) -> list[tuple[J, int]]:
        """Admit what fits; the prefill of this step: requests, each with its number of prompt tokens."""
        chunks: list[tuple[J, int]] = []
        budget = self.chunk
        for job in self.running:
            if job.n_left and budget > 0:
                chunks.append((job, self._chunk_of(job, budget)))
                budget -= chunks[-1][1]
        while budget > 0 and self.waiting and self._can_admit(self.waiting[0]):
            job = self.waiting.popleft()
            self.running.append(job)
            if self.on_admit is not None:
                self.on_admit(job)
            chunks.append((job, self._chunk_of(job, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _chunk_of(self, job: J, budget: int) -> int:
        return job.n_left if job.atomic else min(job.n_left, self.chunk if job.fixed_chunks else budget)

    def _can_admit(self, job: J) -> bool:
        rows = sum(j.n_rows for j in self.running) + job.n_rows
        tokens = sum(j.cache_tokens for j in self.running) + job.cache_tokens
        return rows <= self.max_rows and (self.max_cache_tokens is None or tokens <= self.max_cache_tokens)


def bucket_by_length(items: Sequence[T], length: Callable[[T], int]) -> list[list[T]]:
    """Items in buckets to be padded to their longest: no bucket is more than half padding."""
    buckets: list[list[T]] = []
    for item in sorted(items, key=length, reverse=True):
        if not buckets or 2 * length(item) < length(buckets[-1][0]):
            buckets.append([])
        buckets[-1].append(item)
    return buckets
