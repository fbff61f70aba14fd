"""What a trainer asks of data: examples by number.

Nothing remembers where training is. Which examples step s reads is a function of the seed and s (`order`), and what
is random about an example (where to mask, what to corrupt) is a function of the seed, the epoch and its number. So
resuming is free at any step, and the order is the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heedful.models.base import Batch

IGNORED = -100  # a target that does not count


@dataclass(frozen=True)
class Draw:
    """One example as one epoch shows it."""

    epoch: int
    index: int

    def random(self, seed: int) -> np.random.Generator:
        """The random numbers of this draw: the same on every machine, whatever was drawn before."""
        return np.random.Generator(np.random.Philox(key=[seed, (self.epoch << 40) + self.index]))


class Dataset(Protocol):
    """Examples by number; every kind of data has a class that keeps this."""

    def __len__(self) -> int:
        """How many examples an epoch has."""
        ...

    @property
    def fingerprint(self) -> str:
        """Another one if the data, or how it is cut into examples, is another."""
        ...

    @property
    def lengths(self) -> np.ndarray | None:
        """How long each example is, for batches of like lengths; None if all are alike."""
        ...

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """These examples together, padded, with their targets; tensors on the CPU, the same for the same arguments."""
        ...


def count_tokens(batch: Batch) -> int:
    """The tokens a model reads in a batch, padding included; the images where there are no tokens."""
    read = [x.numel() for x in (batch.tokens, batch.source) if x is not None]
    return sum(read) if read else 0 if batch.images is None else len(batch.images)
