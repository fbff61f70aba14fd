"""Special-token templates: [CLS] a [SEP] b [SEP] for BERT, <s> a </s></s> b </s> for RoBERTa.

Inferred from the tokenizer itself, so that texts can be truncated without losing their special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heedful.data.ragged import Ids
from heedful.text import Tokenizer


class SpecialTokenTemplate:
    """The special tokens that a tokenizer puts around one text, and around a pair of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        text = next((c for c in "a0.字" if tokenizer.encode(c)), "")
        probe = tokenizer.encode(text)
        self.before, self.after = _around(tokenizer.encode(text, add_special=True), probe)
        pair, segments = tokenizer.encode_pair(text, text)
        place = _find(pair, probe, len(self.before))
        rest = pair[place + len(probe) :]
        second = _find(rest, probe, 0)
        self.pair_before, self.between, self.pair_after = (
            pair[:place],
            rest[:second],
            rest[second + len(probe) :],
        )
        # How many of the tokens between the texts belong to the first segment.
        self.has_segments = any(segments)
        self.same_segment = sum(s == 0 for s in segments[place + len(probe) : place + len(probe) + second])

    @property
    def n_pair(self) -> int:
        """The number of special tokens around a pair of texts."""
        return len(self.pair_before) + len(self.between) + len(self.pair_after)

    def wrap(self, ids: Ids, max_length: int | None = None) -> np.ndarray:
        """A text with its special tokens, truncated to `max_length` tokens in all."""
        if max_length is not None:
            ids = ids[: max(0, max_length - len(self.before) - len(self.after))]
        return _joined(self.before, ids, self.after)

    def wrap_pair(self, first: Ids, second: Ids, max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A pair with its special tokens, and each token's segment. The longer text is truncated first, as in BERT;
        of an odd number of tokens it keeps one more (the second, where both were equally long), as in transformers."""
        if max_length is not None:
            room = max(0, max_length - self.n_pair)
            half = room // 2 + (room % 2 if len(first) > len(second) else 0)
            n_first = max(half, room - len(second))
            first = first[:n_first]
            second = second[: room - len(first)]
        ids = _joined(self.pair_before, first, self.between, second, self.pair_after)
        segments = np.zeros(len(ids), dtype=np.int64)
        if self.has_segments:
            segments[len(self.pair_before) + len(first) + self.same_segment :] = 1
        return ids, segments


def _joined(*parts: Ids) -> np.ndarray:
    return np.concatenate([np.asarray(p, dtype=np.int64) for p in parts])


def _around(whole: Sequence[int], inner: Sequence[int]) -> tuple[list[int], list[int]]:
    place = _find(whole, inner, 0)
    return list(whole[:place]), list(whole[place + len(inner) :])


def _find(whole: Sequence[int], inner: Sequence[int], begin: int) -> int:
    n = len(inner)
    found = [i for i in range(begin, len(whole) - n + 1) if list(whole[i : i + n]) == list(inner)]
    if not found:
        raise ValueError("this tokenizer does not keep a text together when it surrounds it with special tokens")
    return found[0]
