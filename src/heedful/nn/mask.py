"""Attention masks: causal, sliding window, padding and packed documents.

A `Mask` is a description that becomes a matrix only when a layer needs one: fused kernels get a plain causal mask as a
flag, and no mask where every query may attend to every key. Sequences are padded on the right, so causal models need no
padding mask: the causal mask already excludes what comes after a real token.

    B batch, T queries (targets), S keys (sources)
"""

from __future__ import annotations

import torch
from torch import Tensor


class Mask:
    """Which of S keys each of T queries may attend to; the matrix is built at most once per window size.

    `starts` is the position of each row's first query (the number of cached tokens), a single number if it is the
    same for all rows. `lengths` (B,) masks the padded keys of a bidirectional batch. `documents` (B, T) numbers the
    documents packed into a row; a token attends only to its own.
    """

    def __init__(
        self,
        n_queries: int,
        n_keys: int,
        *,
        causal: bool,
        starts: int | list[int] = 0,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.n_queries, self.n_keys, self.causal = n_queries, n_keys, causal
        self.starts, self.lengths, self.documents = starts, lengths, documents
        self.device = device
        self._dense: dict[int | None, Tensor | None] = {}

    def is_plain_causal(self, window: int | None) -> bool:
        """True if the causal flag of fused kernels, aligned to the top left, describes the whole mask."""
        return (
            self.causal
            and isinstance(self.starts, int)
            and self.starts == 0
            and self.n_queries == self.n_keys
            and self.n_queries > 1
            and self.lengths is None
            and self.documents is None
            and (window is None or window >= self.n_keys)
        )

    def dense(self, window: int | None = None) -> Tensor | None:
        """The matrix (B or 1, 1, T, S), True where a query may attend; None if it may attend everywhere."""
        if window not in self._dense:
            self._dense[window] = self._build(window)
        return self._dense[window]

    def _build(self, window: int | None) -> Tensor | None:
        allowed: Tensor | None = None
        if self.causal and not self._attends_everywhere(window):
            keys = torch.arange(self.n_keys, device=self.device)
            starts = torch.as_tensor(self.starts, device=self.device).view(-1, 1)
            queries = starts + torch.arange(self.n_queries, device=self.device)  # (B or 1, T)
            distance = queries[:, None, :, None] - keys  # (B or 1, 1, T, S)
            allowed = distance >= 0
            if window is not None:
                allowed &= distance < window
        if self.lengths is not None:
            keys = torch.arange(self.n_keys, device=self.lengths.device)
            allowed = _and(allowed, (keys < self.lengths[:, None])[:, None, None, :])
        if self.documents is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            allowed = _and(allowed, same)
        return allowed

    def _attends_everywhere(self, window: int | None) -> bool:
        """True for one query at the last key: the causal mask excludes nothing."""
        at_end = isinstance(self.starts, int) and self.n_queries == 1 and self.starts + 1 == self.n_keys
        return at_end and (window is None or window >= self.n_keys)


def _and(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def positions_in_documents(documents: Tensor) -> Tensor:
    """Positions (B, T) that restart at 0 with each packed document, from document numbers (B, T)."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values
