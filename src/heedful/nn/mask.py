"""Which keys each query may see.

A `Mask` says what is allowed (nothing after me, nothing padded, nothing from another document) and becomes a
matrix only when a layer needs one: the plain cases are handed to the fused kernels as a flag or as nothing at all.
Sequences are always padded on the right, so a causal model never needs a padding mask: what lies after a
position is already out of its sight.

    B batch, T queries (targets), S keys (sources)
"""

from __future__ import annotations

import torch
from torch import Tensor


class Mask:
    """What T queries may see of S keys; asked once per layer, built at most once per window.

    `starts` holds, per row, the position of the first query (the tokens already in a cache); one number if all
    rows agree. `lengths` (B,) hides the padded keys of a bidirectional batch. `documents` (B, T) numbers the
    documents packed into a row; a token sees only its own.
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
        """True if the fused kernels' own causal flag says it all (they align it to the top left)."""
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
        """The matrix (B or 1, 1, T, S), True where a query may look; None if it may look everywhere."""
        if window not in self._dense:
            self._dense[window] = self._build(window)
        return self._dense[window]

    def _build(self, window: int | None) -> Tensor | None:
        allowed: Tensor | None = None
        if self.causal and not self._sees_everything(window):
            keys = torch.arange(self.n_keys, device=self.device)
            starts = torch.as_tensor(self.starts, device=self.device).view(-1, 1)
            queries = starts + torch.arange(self.n_queries, device=self.device)  # (B or 1, T)
            distance = queries[:, None, :, None] - keys  # (B or 1, 1, T, S)
            allowed = distance >= 0
            if window is not None:
                allowed &= distance < window
        if self.lengths is not None:
            keys = torch.arange(self.n_keys, device=self.lengths.device)
            allowed = _both(allowed, (keys < self.lengths[:, None])[:, None, None, :])
        if self.documents is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            allowed = _both(allowed, same)
        return allowed

    def _sees_everything(self, window: int | None) -> bool:
        """One query at the very end of the keys: causality hides nothing from it."""
        at_end = isinstance(self.starts, int) and self.n_queries == 1 and self.starts + 1 == self.n_keys
        return at_end and (window is None or window >= self.n_keys)


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def positions_in_documents(documents: Tensor) -> Tensor:
    """Positions that start again at 0 with each packed document.  (B, T) -> (B, T)"""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values
