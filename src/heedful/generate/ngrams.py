"""Blocking repeated n-grams (Paulus et al. 2018, section 2.5): no n tokens in a row occur twice, the prompt's too."""

from __future__ import annotations

from collections.abc import Iterable


class NgramBlocker:
    """The n-grams of a sequence so far, and which tokens would repeat one."""

    def __init__(self, size: int, tokens: Iterable[int] = ()) -> None:
        self._size = size
        self._suffix: tuple[int, ...] = ()  # the last size - 1 tokens
        self._after: dict[tuple[int, ...], list[int]] = {}  # what followed each size - 1 tokens
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add the next token of the sequence."""
        if len(self._suffix) == self._size - 1:
            self._after.setdefault(self._suffix, []).append(token)
        self._suffix = (*self._suffix, token)[1 - self._size :] if self._size > 1 else ()

    @property
    def banned(self) -> list[int]:
        """The tokens that would complete an n-gram that the sequence has already."""
        return self._after.get(self._suffix, [])
