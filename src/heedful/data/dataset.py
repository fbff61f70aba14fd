"""The interface between data and trainer: examples by index.

Data has no state. Which examples step s reads is a function of the seed and s (loader.py), and what is random about an
example (where to mask, what to corrupt) is a function of the seed, the epoch and its index. So training resumes at any
step, and the order is the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heedful.models.base import Batch

IGNORED = -100  # a position without a target (ignore_index)


@dataclass(frozen=True)
class Draw:
    """An example as it is sampled in one epoch."""

    epoch: int
    index: int

    def random(self, seed: int) -> np.random.Generator:
        """The random generator of this draw: the same on every machine, independent of earlier draws."""
        return np.random.Generator(np.random.Philox(key=[seed, (self.epoch << 40) + self.index]))


class Dataset(Protocol):
    """Examples by index: the protocol of every kind of data."""

    def __len__(self) -> int:
        """The number of examples of an epoch."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        ...

    @property
    def lengths(self) -> np.ndarray | None:
        """The length of each example, for batches of similar lengths; None if all are equal."""
        ...

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """These examples as one padded batch with targets, on the CPU; deterministic in its arguments."""
        ...


def count_tokens(batch: Batch) -> int:
    """The tokens a model reads in a batch, padding included; the images where there are no tokens."""
    read = [x.numel() for x in (batch.tokens, batch.source) if x is not None]
    return sum(read) if read else 0 if batch.images is None else len(batch.images)
