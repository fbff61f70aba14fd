"""The scheduler of continuous batching: which requests are admitted, and how much of each prompt a step prefills.

It knows nothing of models. Requests run within bounds on rows and on KV-cache tokens, and wait in a `TurnQueue`.

Admission   A request is admitted when there is room for the tokens that it has and for some more of its answer, not
            for all of max_tokens, which most answers never reach. One for which there is no room is overtaken by others
            for which there is, but only so often: then nothing but what is kept for short requests is given away
            before it is its turn.
Shares      `short_share` of the rows and of the cache is kept for requests that are short so far, and a submission of
            many prompts always leaves as large a share of what it could take to others. Without a share (offline) it
            is first come, first served, and all that a request may come to need is reserved for it.
Preemption  When the cache runs out, the request that holds the most tokens is preempted: it gives its rows and cache
            back, and its prompt and the tokens generated so far are prefilled again later. Then all that it may come to
            need is reserved for it, so that it is preempted once at most.
Prefill     A step prefills a bounded part of the admitted prompts, so that a long one does not stall those that decode
            (chunked prefill); only the last of a step may go beyond, if it cannot be divided there. The prompt with the
            least left comes first, so that a short one does not wait for a long one; the oldest gets a share of every
            step, so that it does not wait forever.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from heedful.generate.pace import PrefillPace
from heedful.generate.turns import Owner, TurnQueue

OLDEST = 0.5  # the share of every step that the oldest prompt gets, however many shorter ones there are
MIN_CHUNK = 4  # tokens of the first prompt of a step, whatever they cost
FIXED_CHUNK = 256  # tokens of a prompt whose chunks must not depend on others
AHEAD = 256  # tokens of an answer for which there must be room at admission, fewer in a small cache
SHORT_FITS = 8  # short requests that fit into what is kept for them


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
    def held_tokens(self) -> int:
        """Tokens that it keeps in the KV cache once its prompt is prefilled and the next token is generated."""
        ...

    @property
    def preemptible(self) -> bool:
        """Whether it can be preempted; all that another one may come to need is reserved."""
        ...

    @property
    def owner(self) -> Owner:
        """Whose turn it takes in the queue."""
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


@dataclass
class Usage:
    """Rows and cache tokens that are taken, and those of them that long requests and each owner take."""

    rows: int = 0
    tokens: int = 0
    long_rows: int = 0
    long_tokens: int = 0
    by_owner: dict[Owner, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def add(self, owner: Owner, rows: int, tokens: int, *, long: bool) -> None:
        """Count a request."""
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        if long:
            self.long_rows, self.long_tokens = self.long_rows + rows, self.long_tokens + tokens
        before = self.by_owner[owner]
        self.by_owner[owner] = before[0] + rows, before[1] + tokens


class Scheduler(Generic[J]):
    """The waiting queue and the running requests. A step prefills at most `chunk` prompt tokens, and those of a given
    cost by `pace`. `on_admit` is called with each request before its first prefill, where a prefix cache may shorten
    what is left of its prompt. `short_share` of the rows and of the cache is kept for short requests."""

    def __init__(
        self,
        max_rows: int,
        chunk: int,
        max_cache_tokens: int | None = None,
        on_admit: Callable[[J], None] | None = None,
        pace: PrefillPace | None = None,
        short_share: float = 0.0,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("chunk", chunk), ("cache_tokens", max_cache_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        if not 0 <= short_share < 1:
            raise ValueError(f"short_share is {short_share}: it must be from 0 to less than 1")
        self.max_rows, self.chunk, self.max_cache_tokens, self.on_admit = max_rows, chunk, max_cache_tokens, on_admit
        self.pace, self.short_share = pace or PrefillPace(), short_share
        self.waiting: TurnQueue[J] = TurnQueue()
        self.running: list[J] = []  # in prefill or decoding, in the order of their admission
        self.n_preempted = 0
        self._overtaken: dict[J, int] = defaultdict(int)  # how often, by requests for which there was room
        tokens = math.inf if max_cache_tokens is None else max_cache_tokens
        self._kept_rows, self._kept_tokens = int(short_share * max_rows), short_share * tokens if short_share else 0.0
        self._patience = max_rows if short_share else 0  # how often a request may be overtaken
        self._short = self._kept_tokens / SHORT_FITS  # tokens that a short request holds at most
        self._ahead = int(min(AHEAD, self._short / 2))

    @property
    def most_rows(self) -> int:
        """Rows that a request can have without waiting for a moment in which no short ones run."""
        return self.max_rows - self._kept_rows

    @property
    def most_cache_tokens(self) -> float:
        """Cache tokens that long requests may take together."""
        return math.inf if self.max_cache_tokens is None else self.max_cache_tokens - self._kept_tokens

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
        self._overtaken.pop(job, None)
        if job in self.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)

    # --- preemption --------------------------------------------------------------------------------------------------

    def preempt(self) -> list[J]:
        """Move the longest running requests back to the queue until the others fit into the cache for another step;
        the caller frees their memory."""
        preempted: list[J] = []
        if self.max_cache_tokens is None or not self.short_share:
            return preempted  # all that a request may come to need was reserved
        while self._overflows():
            candidates = [job for job in self.running if job.preemptible]
            if not candidates:
                break  # what is left is reserved in full, and fits
            longest = max(reversed(candidates), key=lambda job: job.held_tokens)  # of equals the youngest
            self.running.remove(longest)
            self.waiting.put_back(longest)
            self._overtaken[longest] = self._patience
            preempted.append(longest)
        self.n_preempted += len(preempted)
        return preempted

    def _overflows(self) -> bool:
        """Whether running requests hold more than there is, or long ones what is kept for short ones."""
        assert self.max_cache_tokens is not None
        used, n_long = Usage(), 0
        for job in self.running:
            held = job.held_tokens if job.preemptible else job.cache_tokens
            long = self._is_long(held)
            used.add(job.owner, job.n_rows, held, long=long)
            n_long += long
        return used.tokens > self.max_cache_tokens or (n_long > 1 and used.long_tokens > self.most_cache_tokens)

    # --- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, cost: float = math.inf) -> list[tuple[J, int]]:
        """The prefill of this step: requests, each with its number of prompt tokens. Together they
        have at most `chunk` tokens, and at most this `cost`."""
        left = [job for job in self.running if job.n_left]
        if not (left or self.waiting):
            return []
        admissible, unfit = self._admissible()
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
                for place, overtaken in unfit:
                    self._overtaken[overtaken] += admissible.index(job) >= place
            n = self._chunk_of(job, tokens_left, cost_left, first=not chunks)
            if n > 0:
                chunks.append((job, n))
                tokens, spent = tokens + n, spent + self.pace.cost(job.n_prefilled, n)
        return chunks

    def _admissible(self) -> tuple[list[J], list[tuple[int, J]]]:
        """The waiting requests for which there is room, in the order of their turns, and those that they overtake, each
        with the number of those whose turn comes before."""
        fitting: list[J] = []
        unfit: list[tuple[int, J]] = []
        used, closed = Usage(), set[Owner]()
        for job in self.running:
            tokens = self._need(job)
            used.add(job.owner, job.n_rows, tokens, long=self._is_long(tokens))
        only_kept = False  # whether a request has been overtaken so often that the others get what is kept alone
        for job in self.waiting.in_turn(closed):
            if used.rows >= self.max_rows:
                break
            tokens = self._need(job)
            if self._fits(job, tokens, used, only_kept=only_kept):
                used.add(job.owner, job.n_rows, tokens, long=self._is_long(tokens))
                fitting.append(job)
                continue
            closed.add(job.owner)
            if self._is_held_back(job, tokens, used):
                continue  # by others of its own submission, and not by those that overtake it
            unfit.append((len(fitting), job))
            if self._overtaken[job] >= self._patience:
                only_kept = True
                if not self.short_share or job.n_rows > self.most_rows or tokens > self.most_cache_tokens:
                    break  # it needs what is kept too
        return fitting, unfit

    def _need(self, job: J) -> int:
        """Cache tokens that are counted for a request at admission."""
        if not (job.preemptible and self.short_share):
            return job.cache_tokens
        return min(job.cache_tokens, job.held_tokens + self._ahead)

    def _is_long(self, tokens: int) -> bool:
        return bool(self.short_share) and tokens > self._short

    def _fits(self, job: J, tokens: int, used: Usage, *, only_kept: bool) -> bool:
        """Whether there is room for a request of so many tokens beside those that are counted in `used`."""
        if used.rows + job.n_rows > self.max_rows:
            return False
        if self.max_cache_tokens is not None and used.tokens + tokens > self.max_cache_tokens:
            return False
        if self._is_long(tokens):
            if only_kept:
                return False
            if used.long_tokens and used.long_tokens + tokens > self.most_cache_tokens:
                return False
            if used.long_rows and used.long_rows + job.n_rows > self.most_rows:
                return False
        elif only_kept:
            if used.rows - used.long_rows + job.n_rows > self._kept_rows:
                return False
            if self.max_cache_tokens is not None and used.tokens - used.long_tokens + tokens > self._kept_tokens:
                return False
        return not self._is_held_back(job, tokens, used)

    def _is_held_back(self, job: J, tokens: int, used: Usage) -> bool:
        """Whether others of its submission run, and take with it more than their share of what they could take."""
        rows, held = used.by_owner.get(job.owner, (0, 0))
        if not (self.short_share and rows):
            return False
        share = 1 - self.short_share
        if rows + job.n_rows > share * (self.max_rows - used.rows + rows):
            return True
        limit = math.inf if self.max_cache_tokens is None else share * (self.max_cache_tokens - used.tokens + held)
        return held + tokens > limit

    def _admit(self, job: J) -> None:
        self._overtaken.pop(job, None)
        self.waiting.take(job)
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
