"""A weighted mixture of datasets, each sampled without replacement in epochs of its own.

An epoch of the mixture has as many indices as its datasets have examples, divided by weight: the first n_0 belong to
dataset 0, the next n_1 to dataset 1, and so on; the loader shuffles them. Index j of dataset k in epoch e of the
mixture is draw number e x n_k + j from that dataset. Divided by the dataset's length, that number gives its own epoch
(the quotient) and an index (the remainder), which a permutation for that epoch maps to the example. So a small dataset
with a large weight is repeated often, a large one with a small weight skips no example, and there is no state: any draw
is computed directly.

With the numbers of examples as weights, every dataset is read once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.data.corpus import json_digest
from heedful.data.dataset import IGNORED, Dataset, Draw
from heedful.data.loader import Permutation
from heedful.models.base import Batch


class Mixture:
    """A dataset that draws from several datasets in proportion to their weights."""

    def __init__(self, sources: Sequence[tuple[Dataset, float]]) -> None:
        if not sources:
            raise ValueError("a mixture of no sources")
        if not all(np.isfinite(weight) and weight > 0 for _, weight in sources):
            raise ValueError(f"weights must be greater than 0, not {[weight for _, weight in sources]}")
        self.datasets = [dataset for dataset, _ in sources]
        self.weights = [float(weight) for _, weight in sources]
        n = sum(map(len, self.datasets))
        shares = np.cumsum(self.weights) / sum(self.weights)
        self._ends = np.round(shares * n).astype(np.int64)  # (K,) end of each dataset's indices
        self._counts = np.diff(self._ends, prepend=0)
        if self._counts.min() < 1:
            raise ValueError(f"weights {self.weights} leave a source without any of the {n} examples of an epoch")
        self._permutation = lru_cache(maxsize=4 * len(sources))(self._shuffle)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return json_digest([[d.fingerprint, w] for d, w in zip(self.datasets, self.weights, strict=True)])

    @property
    def lengths(self) -> None:
        """None: indices map to other examples in each epoch, so batches cannot be grouped by length."""
        return None

    @property
    def bytes_per_token(self) -> float | None:
        """The weighted mean over the datasets, whose examples are windows of one length; None if unknown for any."""
        values = [getattr(dataset, "bytes_per_token", None) for dataset in self.datasets]
        known = [float(value) for value in values if value is not None]
        return float(np.dot(known, self._counts) / len(self)) if len(known) == len(values) else None

    def _shuffle(self, seed: int, source: int, epoch: int) -> Permutation:
        return Permutation(len(self.datasets[source]), seed, 3, source, epoch)

    def find(self, draws: Sequence[Draw], seed: int) -> tuple[np.ndarray, list[Draw]]:
        """The dataset of each draw (B,), and the corresponding draws from those datasets."""
        index = np.array([draw.index for draw in draws])
        source = np.searchsorted(self._ends, index, side="right")  # (B,)
        count = self._counts[source]
        number = np.array([draw.epoch for draw in draws]) * count + index - (self._ends[source] - count)
        epoch, position = np.divmod(number, np.array([len(dataset) for dataset in self.datasets])[source])
        for k, e in set(zip(source.tolist(), epoch.tolist(), strict=True)):
            mine = (source == k) & (epoch == e)
            position[mine] = self._permutation(seed, k, e)(position[mine])
        return source, list(map(Draw, epoch.tolist(), position.tolist()))

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        source, found = self.find(draws, seed)
        rows, batches = [], []
        for k, dataset in enumerate(self.datasets):
            mine = np.flatnonzero(source == k)
            if len(mine):
                rows.append(mine)
                batches.append(dataset.batch([found[row] for row in mine], seed))
        return concatenate_batches(batches, torch.from_numpy(np.concatenate(rows)))


def concatenate_batches(batches: Sequence[Batch], rows: Tensor) -> Batch:
    """Several batches as one, padded to the longest; their examples, in order, become the rows `rows`."""
    result = Batch()
    for field in fields(Batch):
        values = [getattr(batch, field.name) for batch in batches]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            values = [_filled(batch, field.name) for batch in batches]
        setattr(result, field.name, _stacked(values, field.name, rows))
    for kind, of in (("lengths", "tokens"), ("source_lengths", "source")):
        widths = {getattr(batch, of).shape[1] for batch in batches if getattr(batch, of) is not None}
        if getattr(result, kind) is None and len(widths) > 1:  # none is padded, but their widths differ
            setattr(result, kind, _stacked([_filled(batch, kind) for batch in batches], kind, rows))
    return result


def _stacked(values: list[Tensor], name: str, rows: Tensor) -> Tensor:
    if len({value.ndim for value in values}) > 1 or len({value.shape[2:] for value in values}) > 1:
        raise ValueError(f"the sources of a mixture do not fit together: their {name} have other shapes")
    if values[0].ndim == 2:
        width, fill = max(value.shape[1] for value in values), IGNORED if name == "targets" else 0
        values = [F.pad(value, (0, width - value.shape[1]), value=fill) for value in values]
    together = torch.cat(values)
    result = torch.empty_like(together)
    result[rows] = together
    return result


def _filled(batch: Batch, name: str) -> Tensor:
    """The field's value, or the default that None stands for."""
    value: Tensor | None = getattr(batch, name)
    if value is not None:
        return value
    tokens = batch.source if name == "source_lengths" else batch.tokens
    if tokens is not None and name in ("lengths", "source_lengths"):  # no row is padded
        return torch.full((len(tokens),), tokens.shape[1])
    if tokens is not None and name in ("documents", "segments"):  # one document, one segment
        return torch.zeros_like(tokens)
    raise ValueError(f"the sources of a mixture do not fit together: only some have {name}")
