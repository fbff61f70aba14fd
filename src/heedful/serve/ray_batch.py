"""Batches on a Ray cluster: replicas of the models, each an actor with an engine of its own.

Requests are given out in small groups, so that a fast replica gets more of them. An actor that dies is started again by
Ray, wherever there is room; what it had not answered is given to the others. Answers are written by the driver alone:
none is lost, and none is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from heedful.serve.batch import BatchClient, run_together
from heedful.serve.batch_files import BatchAnswer, BatchRequest
from heedful.serve.options import Options

GROUP = 8  # requests that a replica gets at once
MAX_RESTARTS = 3  # of a replica


class Replica:
    """The models in a process of the cluster."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @cached_property
    def client(self) -> BatchClient:
        """Made by the first call, so that what is wrong with the options is an error of that call."""
        return BatchClient(self.options)

    @ray.method(max_task_retries=-1)
    async def start(self) -> tuple[str, ...]:
        """The names of the models; it waits for a process that has died to be started again."""
        return self.client.manager.names

    async def answer(self, requests: list[BatchRequest]) -> list[BatchAnswer]:
        """The answers to a group of requests."""
        return await asyncio.gather(*map(self.client.answer, requests))


class RequestGroups:
    """Requests in groups; each is taken by one replica, and by another if that dies."""

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self.requests = requests
        self.unanswered: deque[list[BatchRequest]] = deque()
        self.n_taken = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[list[BatchRequest]]:
        """The next group, which is answered if the block ends well; an empty one when all are answered."""
        while not (group := self._next()) and self.n_taken:
            await self._changed.wait()  # the others may leave theirs unanswered
        self.n_taken += 1
        try:
            yield group
        except BaseException:
            self.unanswered.append(group)
            raise
        finally:
            self.n_taken -= 1
            self._changed.set()
            self._changed = asyncio.Event()

    def _next(self) -> list[BatchRequest]:
        return self.unanswered.popleft() if self.unanswered else list(islice(self.requests, GROUP))


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Within the block this process is a driver of the cluster; without an address Ray finds one, or starts it here."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ValueError(f"there is no Ray cluster at {address!r}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def resources(options: Options, replicas: int, cpus: int | None) -> dict[str, Any]:
    """What Ray sets aside for a replica: a GPU, or its part of the cluster's cores."""
    if options.device is not None and options.device.startswith("cuda"):
        return {"num_gpus": 1, "num_cpus": cpus or 1}
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return {"num_cpus": cpus or max(1, int(total.get("CPU", 1)) // replicas)}


async def answer_batch_on_ray(
    requests: Iterator[BatchRequest],
    n_requests: int,
    options: Options,
    write: Callable[[BatchAnswer], None],
    *,
    replicas: int,
    cpus: int | None = None,
) -> None:
    """Answer all requests with the replicas; `write` gets the answers in the order they are done."""
    actor_class: Any = ray.remote(max_restarts=MAX_RESTARTS, **resources(options, replicas, cpus))(Replica)
    actors = [actor_class.remote(options) for _ in range(replicas)]
    groups = RequestGroups(requests)

    async def feed(actor: Any) -> None:
        """Give groups to a replica until all are answered, or it is dead for good."""
        while True:
            try:
                await actor.start.remote()
                while True:
                    async with groups.take() as group:
                        for answer in await actor.answer.remote(group) if group else ():
                            write(answer)
                    if not group:
                        return
            except ActorDiedError:
                return
            except RayActorError:
                continue  # it is started again

    # As many at once as keep the engine's batch full, but no more than a replica's part of them.
    at_once = min(2 * options.max_rows, math.ceil(n_requests / replicas))
    try:
        await run_together(feed(actor) for _ in range(math.ceil(at_once / GROUP)) for actor in actors)
    except RayTaskError as error:
        raise error.cause from None
    finally:
        for actor in actors:
            ray.kill(actor)
    if groups.unanswered:
        raise ChildProcessError(
            f"all {replicas} workers have died, each after {MAX_RESTARTS} restarts: their logs, in Ray's folder for "
            "them, say why. What is answered is kept: the same command goes on"
        )
