"""Batches for training: which examples each step reads, and a loader that makes them ahead of time.

Which examples step s reads is a function of the seed and s alone, so training resumes at any step without replaying the
ones before. An epoch is a permutation of the examples, and epochs follow each other without a gap: step s reads the
examples s x batch_size to (s + 1) x batch_size of that endless sequence, and a batch may straddle two epochs.

Up to a million examples the permutation is a list. Beyond, it is a Feistel network, which needs no memory: an index is
written as two digits (l, r), and in each round one digit is shifted, modulo its range, by a keyed hash of the other. A
round is invertible, so the network permutes all pairs; results past the last example are encrypted again until they
are in range (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").

`batch_size` examples make one optimizer step, on any number of processes: the examples of a step are cut into
processes x accumulate nearly equal parts, and each process takes its own, so one process or eight read the same data.
Worker threads make batches ahead: they share the memory-mapped data and hand over tensors without copying.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice

import numpy as np

from heedful.data.dataset import Dataset, Draw
from heedful.models.base import Batch

AHEAD = 2  # steps that each worker prefetches
LISTED = 2**20  # examples up to which a permutation is stored as a list
ROUNDS = 8
POOL = 64  # batches within which examples are sorted by length


def random_bits(n: int, *key: int) -> np.ndarray:
    """n random uint64 of a key. numpy guarantees this stream for all versions, unlike its shuffles."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(n)


class Permutation:
    """A keyed pseudorandom permutation of 0 ... n - 1, called with an array of indices."""

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self._list: np.ndarray | None = None
        if n <= LISTED:
            self._list = np.argsort(random_bits(n, *key), kind="stable")
        else:
            self._keys = random_bits(ROUNDS, *key)
            self._n_left = math.isqrt(n - 1) + 1
            self._n_right = -(-n // self._n_left)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The images of these indices."""
        if self._list is not None:
            return self._list[places]
        found = self._encrypt(places.astype(np.uint64))
        while (outside := found >= self.n).any():
            found[outside] = self._encrypt(found[outside])
        return found.astype(np.int64)

    def _encrypt(self, places: np.ndarray) -> np.ndarray:
        """One pass of the Feistel network; results may be n or above."""
        n_left, n_right = np.uint64(self._n_left), np.uint64(self._n_right)
        left, right = np.divmod(places, n_right)
        for i, key in enumerate(self._keys):
            if i % 2:
                left = (left + _hash(right ^ key) % n_left) % n_left
            else:
                right = (right + _hash(left ^ key) % n_right) % n_right
        return left * n_right + right


def _hash(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014): every bit depends on every bit. Overflow is intended."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BatchSampler:
    """The examples of every step of training, over all processes.

    With `lengths`, a batch has examples of similar length: each pool of 64 batches of the shuffled epoch is sorted, cut
    into batches, and the batches are shuffled. (A batch that straddles two epochs is not sorted.)
    """

    def __init__(
        self,
        n_examples: int,
        batch_size: int,
        seed: int,
        lengths: np.ndarray | None = None,
        shuffle: bool = True,
    ) -> None:
        if n_examples < 1:
            raise ValueError("there are no examples to train on")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if lengths is not None and len(lengths) != n_examples:
            raise ValueError(f"{n_examples} examples with {len(lengths)} lengths")
        self.n_examples, self.batch_size, self.seed = n_examples, batch_size, seed
        self.lengths, self.shuffle = lengths, shuffle
        # A batch needs at most two, of this epoch and the next; a list of a million takes a tenth of a second.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: Permutation(n_examples, seed, 0, epoch))
        self._pool = lru_cache(maxsize=4)(self._sorted_pool)

    def __call__(self, step: int) -> list[Draw]:
        """The examples of a step."""
        draws: list[Draw] = []
        epoch, begin = divmod(step * self.batch_size, self.n_examples)
        while len(draws) < self.batch_size:
            end = min(begin + self.batch_size - len(draws), self.n_examples)
            draws += [Draw(epoch, index) for index in self._examples(epoch, begin, end).tolist()]
            epoch, begin = epoch + 1, 0
        return draws

    def _examples(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Examples begin ... end of an epoch's order, at most a batch."""
        if self.lengths is None:
            return self._shuffled(epoch, begin, end)
        head = self._head(epoch)
        if begin < head:
            return self._shuffled(epoch, begin, end)
        pool, first = divmod(begin - head, POOL * self.batch_size)
        return self._pool(epoch, pool)[first : first + end - begin]

    def _head(self, epoch: int) -> int:
        """How many examples of this epoch complete the last batch of the previous one."""
        return min(-epoch * self.n_examples % self.batch_size, self.n_examples)

    def _shuffled(self, epoch: int, begin: int, end: int) -> np.ndarray:
        places = np.arange(begin, end)
        return self._permutation(epoch)(places) if self.shuffle else places

    def _sorted_pool(self, epoch: int, number: int) -> np.ndarray:
        assert self.lengths is not None
        begin = self._head(epoch) + number * POOL * self.batch_size
        members = self._shuffled(epoch, begin, min(begin + POOL * self.batch_size, self.n_examples))
        members = members[np.argsort(self.lengths[members], kind="stable")]
        n_whole = len(members) // self.batch_size
        if self.shuffle:  # full batches; a remainder stays last, where the next epoch completes it
            batches = members[: n_whole * self.batch_size].reshape(n_whole, self.batch_size)
            order = np.argsort(random_bits(n_whole, self.seed, 1, epoch, number), kind="stable")
            members = np.concatenate([batches[order].reshape(-1), members[n_whole * self.batch_size :]])
        return members


class BatchLoader:
    """Loads the batches of one process (`rank` of `world_size`): `accumulate` micro-batches per step."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} processes")
        if accumulate < 1 or workers < 0:
            raise ValueError(f"accumulate={accumulate} must be at least 1, workers={workers} at least 0")
        if batch_size < world_size * accumulate:
            raise ValueError(
                f"a batch of {batch_size} cannot be cut into {world_size} processes x {accumulate} parts;"
                f" set train.batch_size to {world_size * accumulate} or more"
            )
        self.dataset, self.seed, self.workers = dataset, seed, workers
        self.sampler = BatchSampler(len(dataset), batch_size, seed, dataset.lengths)
        bounds = [batch_size * i // (world_size * accumulate) for i in range(world_size * accumulate + 1)]
        mine = range(rank * accumulate, (rank + 1) * accumulate)
        self._parts = [slice(bounds[i], bounds[i + 1]) for i in mine]

    def draws(self, step: int) -> list[list[Draw]]:
        """The examples of this process in a step, by micro-batch."""
        draws = self.sampler(step)
        return [draws[part] for part in self._parts]

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of this process in a step."""
        return [self.dataset.batch(part, self.seed) for part in self.draws(step)]

    def steps(self, begin: int, end: int) -> Iterator[list[Batch]]:
        """`step` of begin ... end - 1, prefetched by the workers; their exceptions are raised here."""
        if self.workers == 0:
            yield from map(self.step, range(begin, end))
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="heedful-loader")
        python_ends = sys.is_finalizing  # kept here: the names of modules are gone by then
        try:
            made: Iterator[Future[list[Batch]]] = (pool.submit(self.step, s) for s in range(begin, end))
            ahead = deque(islice(made, AHEAD * self.workers))
            while ahead:
                batches = ahead.popleft().result()
                ahead.extend(islice(made, 1))
                yield batches
        finally:  # also when the caller stops early
            if not python_ends():  # else the threads have ended already
                pool.shutdown(wait=True, cancel_futures=True)


def validation_batches(
    dataset: Dataset, *, batch_size: int, seed: int, n_batches: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Every example once, in order, or by length if lengths vary; the last batch may be smaller.

    `n_batches` of them (0: all), spread evenly over the data; each process of several takes every world_size-th.
    """
    n, lengths = len(dataset), dataset.lengths
    total = -(-n // batch_size)
    wanted = min(n_batches, total) if n_batches else total
    order = range(n) if lengths is None else np.argsort(lengths, kind="stable").tolist()
    for i in range(rank, wanted, world_size):
        begin = (i * total // wanted) * batch_size
        yield dataset.batch([Draw(0, index) for index in order[begin : begin + batch_size]], seed)
