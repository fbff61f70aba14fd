"""Shared by all datasets: ragged arrays, padding, content digests, subsets and random splits.

B rows, T positions
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.data.dataset import Dataset, Draw
from heedful.models.base import Batch

Ids = Sequence[int] | np.ndarray


class RaggedArray:
    """Rows of ids of unequal length, concatenated in one array: a million lists would be a million objects."""

    def __init__(self, rows: Iterable[Ids]) -> None:
        parts = [np.asarray(row, dtype=np.int32) for row in rows]
        self.lengths = np.array([len(p) for p in parts], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]) if parts else self.lengths
        self.values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        begin = self.starts[index]
        row: np.ndarray = self.values[begin : begin + self.lengths[index]]
        return row


def pad_ids(rows: Sequence[Ids], fill: int, length: int | None = None) -> Tensor:
    """Rows as one int64 tensor (B, T), `fill` on the right; T is the longest row unless given."""
    width = max((len(row) for row in rows), default=0) if length is None else length
    out = np.full((len(rows), width), fill, dtype=np.int64)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(out)


def lengths_if_padded(rows: Sequence[Ids], length: int | None = None) -> Tensor | None:
    """The length of each row (B,), None if no row is padded."""
    lengths = [len(row) for row in rows]
    if all(n == (max(lengths) if length is None else length) for n in lengths):
        return None
    return torch.tensor(lengths)


def content_digest(*parts: Any) -> str:
    """A digest of arrays, texts and numbers, in order."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, RaggedArray):
            found.update(content_digest(part.values, part.lengths).encode())
        elif isinstance(part, np.ndarray):
            found.update(f"{part.dtype.str}{part.shape}".encode())
            flat = part.reshape(-1)
            for begin in range(0, flat.size, 2**24):  # a memory-mapped file is read in parts
                found.update(flat[begin : begin + 2**24].tobytes())
        else:
            found.update(f"{type(part).__name__}:{part!r};".encode())
    return found.hexdigest()


class Subset:
    """A subset of the examples of a dataset."""

    def __init__(self, dataset: Dataset, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest(self.dataset.fingerprint, self.indices)

    @property
    def lengths(self) -> np.ndarray | None:
        """The length of each example in tokens, for batches of similar lengths."""
        lengths = self.dataset.lengths
        return None if lengths is None else lengths[self.indices]

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        return self.dataset.batch([Draw(d.epoch, int(self.indices[d.index])) for d in draws], seed)


def random_split(dataset: Dataset, share: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Split a dataset at random in two, the second with about `share` of the examples.

    Examples of one group (`dataset.groups`: windows of one passage, say) stay together.
    """
    groups = np.asarray(getattr(dataset, "groups", np.arange(len(dataset))))
    names = np.unique(groups)
    n_second = round(share * len(names))
    if not 0 < n_second < len(names):
        raise ValueError(
            f"{share:g} of {len(names)} examples leaves none on one side: give validation data of its own, or more data"
        )
    chosen = np.random.default_rng(seed).permutation(names)[:n_second]
    second = np.isin(groups, chosen)
    return Subset(dataset, np.flatnonzero(~second)), Subset(dataset, np.flatnonzero(second))
