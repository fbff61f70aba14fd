"""Tokenized text, and windows of it as examples for a causal language model (prepare.py tokenizes).

B batch, T tokens of a window, N tokens, D documents
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from heedful.data.dataset import IGNORED, Draw
from heedful.data.loader import random_bits
from heedful.models.base import Batch


@dataclass(frozen=True)
class Corpus:
    """The tokens of concatenated documents, and their size in UTF-8 bytes."""

    tokens: np.ndarray  # (N,) unsigned integers
    starts: np.ndarray  # (D,) int64, the first is 0
    n_bytes: int
    fingerprint: str
    notes: tuple[str, ...] = ()  # decisions made while reading, for printing

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], n_bytes: int = 0) -> Corpus:
        """A corpus of token ids in memory, end-of-text tokens included."""
        parts = [np.asarray(ids, dtype=np.uint32) for ids in documents if len(ids)]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        starts = np.cumsum([0, *map(len, parts[:-1])], dtype=np.int64)[: len(parts)]
        content = hashlib.blake2b(tokens.tobytes() + starts.tobytes(), digest_size=16)
        return cls(tokens, starts, n_bytes, content.hexdigest())

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes per token."""
        return self.n_bytes / max(len(self.tokens), 1)


class TokenWindows:
    """Windows of `length` tokens with next-token targets.

    For training (`shifted`) every epoch cuts the text at another random offset, so that tokens at a window's edge are
    inside one later; up to a window at either end is left out. For validation windows follow each other from the first
    token to the last, and the last one may be shorter.

    With several `documents`, Batch.documents numbers those of each row, so that attention stays inside each, and the
    first token of a document is no target.
    """

    def __init__(self, corpus: Corpus, length: int, *, shifted: bool = True, documents: bool = True) -> None:
        n = len(corpus.tokens)
        if length < 1:
            raise ValueError(f"windows of {length} tokens: set data.length to at least 1")
        if n < 2:
            raise ValueError(f"a text of {n} tokens: at least 2 are needed, one to read and one to predict")
        if shifted and n < length + 1:
            raise ValueError(
                f"the text has {n} tokens, and a window of {length} needs {length + 1}:"
                f" set data.length to at most {n - 1}, or give more text"
            )
        self.corpus, self.length, self.shifted = corpus, length, shifted
        self.documents = documents and len(corpus.starts) > 1
        # Whatever its offset, every epoch has the same number of full windows.
        self._n = max(1, n // length - 1) if shifted else -(-(n - 1) // length)
        self._n_offsets = min(length, n - self._n * length) if shifted else 1
        self._offset = lru_cache(maxsize=4)(self._random_offset)
        tokens = corpus.tokens.view(np.ndarray)  # np.memmap's own indexing is slow
        self._windows = sliding_window_view(tokens, length + 1) if n > length else None  # (N - T, T + 1)

    def __len__(self) -> int:
        return self._n

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return json_digest([self.corpus.fingerprint, self.length, self.shifted, self.documents])

    @property
    def lengths(self) -> None:
        """None: all windows have one length."""
        return None

    @property
    def bytes_per_token(self) -> float:
        """Bits per byte = nats per token / ln 2 / this."""
        return self.corpus.bytes_per_token

    def _random_offset(self, seed: int, epoch: int) -> int:
        return int(random_bits(1, seed, 2, epoch)[0] % np.uint64(self._n_offsets))

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        begins = np.array([draw.index for draw in draws]) * self.length  # (B,)
        if self.shifted:
            begins += np.array([self._offset(seed, draw.epoch) for draw in draws])
        n_real = len(self.corpus.tokens) - 1 - begins  # (B,) tokens from here on that have one after them
        if self._windows is not None and n_real.min() >= self.length:
            rows, lengths = self._windows[begins], None  # (B, T + 1)
        else:  # the text ends in a row of this batch
            places = begins[:, None] + np.arange(self.length + 1)
            rows = self.corpus.tokens[np.minimum(places, len(self.corpus.tokens) - 1)]
            lengths = np.minimum(n_real, self.length)
        tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if lengths is not None:
            targets[np.arange(self.length) >= lengths[:, None]] = IGNORED
        numbers = self._number_documents(begins, targets) if self.documents else None
        return Batch(
            tokens=torch.from_numpy(tokens),
            lengths=None if lengths is None else torch.from_numpy(lengths),
            documents=None if numbers is None else torch.from_numpy(numbers),
            targets=torch.from_numpy(targets),
        )

    def _number_documents(self, begins: np.ndarray, targets: np.ndarray) -> np.ndarray | None:
        """Document numbers (B, T), from 0 in each row; None if every row is one document. Sets the targets that are a
        document's first token to IGNORED. Only the borders are looked up: rows have few.
        """
        starts = self.corpus.starts
        first = np.searchsorted(starts, begins, side="right")  # (B,) the first document that begins after the row does
        last = np.searchsorted(starts, begins + self.length, side="right")
        counts = last - first
        n_borders = int(counts.sum())
        if n_borders == 0:
            return None
        row = np.repeat(np.arange(len(begins)), counts)  # (borders,)
        number = np.arange(n_borders) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        place = starts[number] - begins[row]  # (borders,) from 1 to T
        targets[row, place - 1] = IGNORED
        marks = np.zeros((len(begins), self.length + 1), dtype=np.int64)
        marks[row, place] = 1
        return np.cumsum(marks[:, :-1], axis=1)


def uniform_cross_entropy(vocab_size: int) -> float:
    """Cross-entropy of a uniform guess among V choices, ln V, in nats."""
    return math.log(vocab_size)


def count_ids(tokens: np.ndarray, n_most: int = 2**24) -> np.ndarray:
    """How often each token id occurs, from 0 to the highest; of a long text, in a sample of about `n_most` tokens."""
    n_blocks = -(-len(tokens) // 2**16)
    stride = max(1, n_blocks // (n_most // 2**16))  # blocks spread over the whole text
    counts = np.zeros(1, dtype=np.int64)
    for block in range(0, n_blocks, stride):
        found = np.bincount(tokens[block * 2**16 : (block + 1) * 2**16])
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    return counts


def unigram_entropy(tokens: np.ndarray, n_most: int = 2**24) -> float:
    """Entropy of the token frequencies (unigram model), in nats per token; of a long text, from a sample."""
    return count_entropy(count_ids(tokens, n_most))


def count_entropy(counts: np.ndarray) -> float:
    """Entropy of the distribution that these counts estimate, in nats."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


def json_digest(made_of: Any) -> str:
    """A digest of JSON data."""
    return hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=16).hexdigest()
