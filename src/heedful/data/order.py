"""Which examples a step of training reads: a function of the seed and the step, entered anywhere at the same price.

An epoch is a permutation of the examples, and epochs follow each other without a gap: step s reads the places
s x batch_size to (s + 1) x batch_size of that endless row, and a batch may straddle the border of two epochs.

Up to a million examples the permutation is a list. Beyond, it is a Feistel network: a place is written as two digits
(l, r), and in turn each digit is moved round its circle by a keyed hash of the other. Every round can be undone, so the
whole is a permutation of the pairs; the few pairs past the last example walk on until they are inside (Black and
Rogaway 2002, "Ciphers with Arbitrary Finite Domains": their generalized Feistel cipher and cycle walking). Any place
costs eight hashes, and no memory.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from heedful.data.dataset import Draw

LISTED = 2**20  # examples up to which a permutation is a list
ROUNDS = 8
POOL = 64  # batches among which examples of like length look for each other


def random_bits(n: int, *key: int) -> np.ndarray:
    """n random uint64 of a key. numpy promises these for all versions, which it does not of shuffles."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(n)


class Permutation:
    """The numbers 0 to n - 1 shuffled by a key: call it with places, get what lies there."""

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
        if self._list is not None:
            return self._list[places]
        found = self._walk(places.astype(np.uint64))
        while (outside := found >= self.n).any():
            found[outside] = self._walk(found[outside])
        return found.astype(np.int64)

    def _walk(self, places: np.ndarray) -> np.ndarray:
        n_left, n_right = np.uint64(self._n_left), np.uint64(self._n_right)
        left, right = np.divmod(places, n_right)
        for i, key in enumerate(self._keys):
            if i % 2:
                left = (left + _hash(right ^ key) % n_left) % n_left
            else:
                right = (right + _hash(left ^ key) % n_right) % n_right
        return left * n_right + right


def _hash(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014): every bit depends on every bit. Overflow is meant."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Order:
    """The draws of every step of training, over all processes.

    With the examples' `lengths` a batch has examples of like length: each pool of 64 batches of the shuffled epoch is
    sorted, cut into batches, and its batches are shuffled. (What an epoch leaves over for a last batch that straddles
    its border, and the next one adds to it, are not alike.)
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
        # A batch needs two at most, of this epoch and the next; a list of a million takes a tenth of a second.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: Permutation(n_examples, seed, 0, epoch))
        self._pool = lru_cache(maxsize=4)(self._sorted_pool)

    def __call__(self, step: int) -> list[Draw]:
        draws: list[Draw] = []
        epoch, begin = divmod(step * self.batch_size, self.n_examples)
        while len(draws) < self.batch_size:
            end = min(begin + self.batch_size - len(draws), self.n_examples)
            draws += [Draw(epoch, index) for index in self._examples(epoch, begin, end).tolist()]
            epoch, begin = epoch + 1, 0
        return draws

    def _examples(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """What lies at the places from begin to end of an epoch; no more than a batch."""
        if self.lengths is None:
            return self._shuffled(epoch, begin, end)
        head = self._head(epoch)
        if begin < head:
            return self._shuffled(epoch, begin, end)
        pool, first = divmod(begin - head, POOL * self.batch_size)
        return self._pool(epoch, pool)[first : first + end - begin]

    def _head(self, epoch: int) -> int:
        """How many examples of this epoch fill up the last batch of the one before."""
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
        if self.shuffle:  # whole batches; what is left over stays at the end, where the next epoch fills it up
            batches = members[: n_whole * self.batch_size].reshape(n_whole, self.batch_size)
            order = np.argsort(random_bits(n_whole, self.seed, 1, epoch, number), kind="stable")
            members = np.concatenate([batches[order].reshape(-1), members[n_whole * self.batch_size :]])
        return members
