"""The scheduler of continuous batching: which requests are admitted, and how much of each prompt a step prefills.

Requests are admitted first come, first served, within bounds on rows and KV-cache tokens. It knows nothing of models.
A request reserves its rows (one per sequence) and its cache tokens when it is admitted, for as long as it runs, so a
running request is never preempted. A step prefills a bounded part of the admitted prompts, so that a long one does not
stall those that decode (chunked prefill); only the last of a step may go beyond, if it cannot be divided there. The
prompt with the least left comes first, so that a short one does not wait for a long one; the oldest gets a share of
every step, so that it does not wait forever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from heedful.generate.pace import PrefillPace

OLDEST = 0.5  # the share of every step that the oldest prompt gets, however many shorter ones there are
MIN_CHUNK = 4  # tokens of the first prompt of a step, whatever they cost
FIXED_CHUNK = 256  # tokens of a prompt whose chunks must not depend on others


class Job(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def n_left(self) -> int:
        """Prompt tokens that are not prefilled yet."""
        ...

    @property
    def n_prefilled(self) -> int:
        """Prompt tokens that are."""
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
    """The waiting queue and the running requests. A step prefills at most `chunk` prompt tokens, and those of a given
    cost by `pace`. `on_admit` is called with each request before its first prefill, where a prefix cache may shorten
    what is left of its prompt."""

    def __init__(
        self,
        max_rows: int,
        chunk: int,
        max_cache_tokens: int | None = None,
        on_admit: Callable[[J], None] | None = None,
        pace: PrefillPace | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("chunk", chunk), ("cache_tokens", max_cache_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        self.max_rows, self.chunk, self.max_cache_tokens, self.on_admit = max_rows, chunk, max_cache_tokens, on_admit
        self.pace = pace or PrefillPace()
        self.waiting: deque[J] = deque()
        self.running: list[J] = []  # in prefill or decoding, in the order of their admission

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

    def schedule(self, cost: float = math.inf) -> list[tuple[J, int]]:
        """The prefill of this step: requests, each with its number of prompt tokens. Together they
        have at most `chunk` tokens, and at most this `cost`."""
        left = [job for job in self.running if job.n_left]
        if not (left or self.waiting):
            return []
        admissible = self._admissible()
        left += admissible
        chunks: list[tuple[J, int]] = []
        tokens, spent = 0, 0.0
        share = 1 - OLDEST if len(left) > 1 else 1.0
        for job in sorted(left, key=lambda job: job.n_left):
            share = 1.0 if job is left[0] else share
            tokens_left, cost_left = math.ceil(share * self.chunk) - tokens, share * cost - spent
            if tokens_left <= 0 or (cost_left <= 0 and chunks):
                continue
            if job in admissible:
                self._admit(job)
            n = self._chunk_of(job, tokens_left, cost_left, first=not chunks)
            if n > 0:
                chunks.append((job, n))
                tokens, spent = tokens + n, spent + self.pace.cost(job.n_prefilled, n)
        return chunks

    def _admissible(self) -> list[J]:
        """The waiting requests, in their order, for which there is room; who does not fit is not overtaken."""
        rows, tokens = sum(job.n_rows for job in self.running), sum(job.cache_tokens for job in self.running)
        found = []
        for job in self.waiting:
            rows, tokens = rows + job.n_rows, tokens + job.cache_tokens
            if rows > self.max_rows or (self.max_cache_tokens is not None and tokens > self.max_cache_tokens):
                break
            found.append(job)
        return found

    def _admit(self, job: J) -> None:
        self.waiting.remove(job)
        self.running.append(job)
        if self.on_admit is not None:
            self.on_admit(job)

    def _chunk_of(self, job: J, tokens: int, cost: float, *, first: bool) -> int:
        """How many tokens of a prompt to prefill where so many, and this cost, are left of the step."""
        if job.atomic:
            return job.n_left
        if job.fixed_chunks:
            return min(job.n_left, self.chunk, FIXED_CHUNK)
        n = min(job.n_left, tokens, self.pace.fitting(job.n_prefilled, cost))
        return max(n, min(job.n_left, tokens, MIN_CHUNK)) if first else n


def bucket_by_length(items: Sequence[T], length: Callable[[T], int]) -> list[list[T]]:
    """Items in buckets to be padded to their longest: no bucket is more than half padding."""
    buckets: list[list[T]] = []
    for item in sorted(items, key=length, reverse=True):
        if not buckets or 2 * length(item) < length(buckets[-1][0]):
            buckets.append([])
        buckets[-1].append(item)
    return buckets
