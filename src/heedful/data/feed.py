"""The batches of one process, made ahead of time.

`batch_size` examples make a step of the optimizer, whatever the number of processes: the draws of a step are cut into
processes x accumulate nearly equal parts, and each process takes its own. So one process or eight read the same.

Batches are made by threads: a batch is mostly copying and PyTorch's own work, during which other threads run, and a
thread shares the memory-mapped data and hands over tensors for nothing. With `workers=0` they are made when asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from heedful.data.dataset import Dataset, Draw
from heedful.data.order import Order
from heedful.models.base import Batch

AHEAD = 2  # steps that each worker is ahead


class Feed:
    """What one process (`rank` of `world`) reads in each step, as `accumulate` batches."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        workers: int = 1,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} processes")
        if accumulate < 1 or workers < 0:
            raise ValueError(f"accumulate={accumulate} must be at least 1, workers={workers} at least 0")
        if batch_size < world * accumulate:
            raise ValueError(
                f"a batch of {batch_size} cannot be cut into {world} processes x {accumulate} parts;"
                f" set train.batch_size to {world * accumulate} or more"
            )
        self.dataset, self.seed, self.workers = dataset, seed, workers
        self.order = Order(len(dataset), batch_size, seed, dataset.lengths)
        bounds = [batch_size * i // (world * accumulate) for i in range(world * accumulate + 1)]
        mine = range(rank * accumulate, (rank + 1) * accumulate)
        self._parts = [slice(bounds[i], bounds[i + 1]) for i in mine]

    def draws(self, step: int) -> list[list[Draw]]:
        """Which examples this process reads in a step."""
        draws = self.order(step)
        return [draws[part] for part in self._parts]

    def step(self, step: int) -> list[Batch]:
        """This process's batches of a step."""
        return [self.dataset.batch(part, self.seed) for part in self.draws(step)]

    def steps(self, begin: int, end: int) -> Iterator[list[Batch]]:
        """`step` of begin, begin + 1 ... end - 1, made ahead by the workers. What fails there fails here."""
        if self.workers == 0:
            yield from map(self.step, range(begin, end))
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="heedful-feed")
        try:
            made: Iterator[Future[list[Batch]]] = (pool.submit(self.step, s) for s in range(begin, end))
            ahead = deque(islice(made, AHEAD * self.workers))
            while ahead:
                batches = ahead.popleft().result()
                ahead.extend(islice(made, 1))
                yield batches
        finally:  # also when the caller stops early, by an error or by Ctrl-C
            pool.shutdown(wait=True, cancel_futures=True)


def once(
    dataset: Dataset, *, batch_size: int, seed: int, n_batches: int = 0, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Every example once, as validation reads them: in order, or by length; the last batch may be smaller.

    `n_batches` of them (0: all), spread evenly over the data; each process of several takes every world-th.
    """
    n, lengths = len(dataset), dataset.lengths
    total = -(-n // batch_size)
    wanted = min(n_batches, total) if n_batches else total
    order = range(n) if lengths is None else np.argsort(lengths, kind="stable").tolist()
    for i in range(rank, wanted, world):
        begin = (i * total // wanted) * batch_size
        yield dataset.batch([Draw(0, index) for index in order[begin : begin + batch_size]], seed)
