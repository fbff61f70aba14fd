"""Batches on a Ray cluster: replicas of the models, each an actor with an engine of its own.

Requests are given out in small groups, so that a fast replica gets more of them. An actor that dies is started again by
Ray, wherever there is room; what it had not answered is given to the others. Answers are written by the driver alone:
none is lost, and none is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from heedful.serve.batch import BatchClient
from heedful.serve.batch_files import BatchAnswer, BatchRequest
from heedful.serve.options import Options

GROUP = 8  # requests that a replica gets at once
MAX_RESTARTS = 3  # of a replica
PATIENCE = 10.0  # seconds for a cluster to accept a connection


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
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit() and "://" not in address:
            socket.create_connection((host, int(port)), PATIENCE).close()  # Ray itself would try for minutes
        ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:  # ConnectionError is one
        raise ValueError(f"there is no Ray cluster at {address or 'RAY_ADDRESS'}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def started_replicas(options: Options, n: int, cpus: int | None = None) -> Iterator[list[Any]]:
    """Actors with the models, each with so many cores; None: its part of the cluster's. They end with the block."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    available = int(total.get("CPU", 1))
    automatic = options.device == "auto" and total.get("GPU", 0) >= n
    on_gpu = automatic or options.device.startswith("cuda")
    cpus = cpus or (1 if on_gpu else max(1, available // n))
    if n * cpus > available:
        warnings.warn(
            f"{n} workers need {n * cpus} cores, and the cluster has {available}: some wait until there are more, "
            "and the others work",
            stacklevel=2,
        )
    settings: Any = {"max_restarts": MAX_RESTARTS, "num_cpus": cpus, "num_gpus": int(on_gpu)}
    actor_class: Any = ray.remote(**settings)(Replica)
    actors = [actor_class.remote(options) for _ in range(n)]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


async def answer_batch_on_ray(
    requests: Iterator[BatchRequest], n_requests: int, actors: list[Any], write: Callable[[BatchAnswer], None],
    *, max_rows: int,
) -> None:  # fmt: skip
    """Answer all requests with replicas; `write` gets the answers in the order they are done."""
    groups = RequestGroups(requests)
    # As many at once as keep the engine's batch full, but no more than a replica's part of them.
    at_once = min(2 * max_rows, math.ceil(n_requests / len(actors)))
    n_feeders = math.ceil(at_once / GROUP)
    feeders = [asyncio.ensure_future(feed(actor, groups, write)) for _ in range(n_feeders) for actor in actors]
    try:
        for feeder in asyncio.as_completed(feeders):
            if await feeder:
                return  # without those that wait for a place in the cluster
    except RayTaskError as error:
        raise error.cause from None
    finally:
        for task in feeders:
            task.cancel()
    raise ChildProcessError(
        f"all {len(actors)} workers have died, each after {MAX_RESTARTS} restarts: Ray's logs of them say why. What is "
        "answered is kept: the same command goes on"
    )


async def feed(actor: Any, groups: RequestGroups, write: Callable[[BatchAnswer], None]) -> bool:
    """Give groups to a replica until all are answered; False if it is dead for good."""
    while True:
        try:
            await actor.start.remote()
            while True:
                async with groups.take() as group:
                    if not group:
                        return True
                    for answer in await actor.answer.remote(group):
                        write(answer)
        except ActorDiedError:
            return False
        except RayActorError:
            continue  # it is started again
