"""The waiting queue of a server: clients take turns, each client's submissions take turns, each submission in order.

A submission is what a client sends at once: one prompt or thousands. So a submission of many prompts delays another one
by a single prompt, and a client with many submissions delays another client by a single prompt.

    client A   submission 1: a1 a2 a3 …
               submission 2: b1             turns: a1 c1 b1 c2 a2 c3 a3 …
    client B   submission 3: c1 c2 c3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar


class Owner(NamedTuple):
    """Whose turn a job takes."""

    client: Hashable
    submission: Hashable


class Owned(Protocol):
    """What the queue needs to know of a job."""

    @property
    def owner(self) -> Owner:
        """Whose turn it takes."""
        ...


J = TypeVar("J", bound=Owned)


class TurnQueue(Generic[J]):
    """Jobs that wait for their turn. Jobs that were `put_back` come before all others."""

    def __init__(self) -> None:
        self._returned: deque[J] = deque()
        self._clients: dict[Hashable, dict[Owner, deque[J]]] = {}  # next turn first, both clients and submissions
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[J]:
        return self.in_turn()

    def __contains__(self, job: J) -> bool:
        return job in self._returned or job in self._clients.get(job.owner.client, {}).get(job.owner, ())

    def append(self, job: J) -> None:
        """Append a job to its submission."""
        submissions = self._clients.setdefault(job.owner.client, {})
        submissions.setdefault(job.owner, deque()).append(job)
        self._n += 1

    def put_back(self, job: J) -> None:
        """Queue a job that had its turn already."""
        self._returned.append(job)
        self._n += 1

    def in_turn(self, closed: Collection[Owner] = ()) -> Iterator[J]:
        """All jobs in the order of their turns. Owners that are added to `closed` meanwhile get no further turn. The
        queue must not change during the iteration."""
        yield from (job for job in self._returned if job.owner not in closed)
        turns = deque(deque((owner, iter(jobs)) for owner, jobs in some.items()) for some in self._clients.values())
        while turns:
            submissions = turns.popleft()
            while submissions:
                owner, jobs = submissions.popleft()
                job = None if owner in closed else next(jobs, None)
                if job is not None:
                    yield job
                    submissions.append((owner, jobs))
                    break
            if submissions:
                turns.append(submissions)

    def take(self, job: J) -> None:
        """Remove a job whose turn it is; its client and its submission go to the end of the line."""
        client = job.owner.client
        if self.remove(job) and client in self._clients:
            submissions = self._clients.pop(client)
            if job.owner in submissions:
                submissions[job.owner] = submissions.pop(job.owner)
            self._clients[client] = submissions

    def remove(self, job: J) -> bool:
        """Remove a job; whether it was waiting for a turn of its submission. ValueError if it is not in the queue."""
        submissions = self._clients.get(job.owner.client, {})
        jobs = submissions.get(job.owner, ())
        in_submission = job in jobs
        if in_submission:
            assert isinstance(jobs, deque)
            jobs.remove(job)
            if not jobs:
                del submissions[job.owner]
            if not submissions:
                del self._clients[job.owner.client]
        else:
            self._returned.remove(job)
        self._n -= 1
        return in_submission

    def n_submissions(self, client: Hashable) -> int:
        """Submissions of a client with jobs in the queue; may be called from another thread."""
        return len(self._clients.get(client, ()))

    def n_jobs(self, client: Hashable) -> int:
        """Jobs of a client in the queue; may be called from another thread."""
        return sum(map(len, list(self._clients.get(client, {}).values())))
