"""Windows of text for CBOW, with its subsampling of frequent words.

B batch, T positions, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from heedful.data.corpus import Corpus, count_ids
from heedful.data.corruption import DocumentWindows
from heedful.data.dataset import IGNORED, Draw
from heedful.data.ragged import content_digest
from heedful.models.base import Batch


class CBOWWindows:
    """Windows of text for CBOW (Mikolov et al. 2013): every word is predicted from its context.

    With `subsample` t, a word whose share of the text is f > t is dropped with probability 1 - √(t / f), and those
    around it become neighbours (section 2.3 of the second paper): frequent words say little, and cost most of the time.
    """

    lengths: None = None

    def __init__(self, corpus: Corpus, length: int = 256, *, shifted: bool = True, subsample: float = 0.0) -> None:
        if length < 2:
            raise ValueError(f"a stretch of {length} word has no neighbours: set data.length to 2 or more")
        self.corpus, self.length, self.subsample = corpus, length, subsample
        self.tokens = corpus.tokens.view(np.ndarray)
        self.cuts = DocumentWindows(np.zeros(1, dtype=np.int64), len(self.tokens), length, least=1, shifted=shifted)

    def __len__(self) -> int:
        return len(self.cuts)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        more = (self.subsample,) if self.subsample else ()
        return content_digest("neighbours", self.corpus.fingerprint, self.length, self.cuts.shifted, *more)

    @cached_property
    def kept(self) -> np.ndarray:
        """The probability (V,) that a word is kept."""
        counts = count_ids(self.tokens)
        share = counts / max(1, counts.sum())
        return np.sqrt(self.subsample / np.maximum(share, self.subsample))

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        begin, end, _ = self.cuts.at(draws, seed)
        n = end - begin
        source = np.clip(begin[:, None] + np.arange(n.max()), 0, len(self.tokens) - 1)  # (B, T)
        if self.subsample:
            source, n = self._subsampled(source, n, draws, seed)
        ids = torch.from_numpy(self.tokens[source].astype(np.int64))
        lengths = None if n.min() == ids.shape[1] else torch.from_numpy(n)
        targets = ids
        if lengths is not None:
            targets = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], IGNORED)
        documents = None
        if len(self.corpus.starts) > 1:
            documents = torch.from_numpy(np.searchsorted(self.corpus.starts, source, side="right"))
        return Batch(ids, lengths, documents=documents, targets=targets)

    def _subsampled(
        self, source: np.ndarray, n: np.ndarray, draws: Sequence[Draw], seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The positions (B, T) of the words that are kept, first in each row, and their number (B,), at least 1."""
        chance = np.stack([d.random(seed).random(source.shape[1]) for d in draws])
        kept = np.take(self.kept, self.tokens[source], mode="clip")
        keep = (chance < kept) & (np.arange(source.shape[1]) < n[:, None])
        order = np.argsort(~keep, axis=1, kind="stable")
        count = np.maximum(keep.sum(axis=1), 1)
        return np.take_along_axis(source, order, axis=1)[:, : count.max()], count
