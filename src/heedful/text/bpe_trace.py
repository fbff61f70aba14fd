"""Byte pair encoding step by step: every merge of a text, for display.

The algorithm as it was first published (Gage 1994, "A New Algorithm for Data Compression"): replace the most frequent
pair of adjacent symbols by a symbol that does not occur yet, and again, until no pair occurs twice. New symbols are
named Z, Y, X ... as in lectures:

    aaabdaaabac
    Z = aa    ZabdZabac
    Y = ab    ZYdZYac
    X = ZY    XdXac

Occurrences are counted as they would be replaced: from the left, without overlap. Among equally frequent pairs the one
made of the oldest symbols wins (so Y = ab, not Za), then the one that comes first in the text.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Merge:
    """One step: `symbol` now stands for `pair`, which was replaced `count` times, giving `text`."""

    symbol: str
    pair: tuple[str, str]
    count: int
    text: str

    def __str__(self) -> str:
        return f"{self.symbol}={''.join(self.pair)}"


@dataclass(frozen=True)
class Trace:
    """All the merges of a text, in order."""

    source: str
    merges: tuple[Merge, ...]

    @property
    def text(self) -> str:
        """The text after the last merge."""
        return self.merges[-1].text if self.merges else self.source

    def expand(self, text: str | None = None) -> str:
        """Undo the merges: symbols back to the characters they stand for."""
        text = self.text if text is None else text
        for merge in reversed(self.merges):
            text = text.replace(merge.symbol, "".join(merge.pair))
        return text

    def __str__(self) -> str:
        lines = [self.source, *(f"{merge}\t{merge.text}" for merge in self.merges)]
        return "\n".join(lines)


def _new_symbols(text: str) -> Iterator[str]:
    """Z down to A, then capital Greek and the private use area; never one that the text contains."""
    used = set(text)
    greek = "".join(chr(code) for code in range(0x391, 0x3AA) if code != 0x3A2)
    private = (chr(code) for code in range(0xE000, 0xF900))
    for symbol in (*reversed(string.ascii_uppercase), *greek, *private):
        if symbol not in used:
            yield symbol


def _count_pairs(text: str) -> dict[tuple[str, str], int]:
    """Non-overlapping occurrences of every adjacent pair, in order of first appearance."""
    counts: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    for start in range(len(text) - 1):
        pair = (text[start], text[start + 1])
        if last.get(pair) == start - 1 and pair[0] == pair[1]:
            continue  # the second "aa" of "aaa" shares a letter with the first
        last[pair] = start
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def trace_merges(text: str, max_merges: int | None = None) -> Trace:
    """Merge pairs of `text` until none occurs twice, or `max_merges` is reached.

    >>> [str(merge) for merge in trace_merges("aaabdaaabac").merges]
    ['Z=aa', 'Y=ab', 'X=ZY']
    >>> trace_merges("aaabdaaabac").text
    'XdXac'
    """
    if max_merges is not None and max_merges < 0:
        raise ValueError(f"max_merges must not be negative, got {max_merges}")
    source, merges = text, list[Merge]()
    born: dict[str, int] = {}  # merged symbol -> the step that made it; original characters are oldest
    for symbol in _new_symbols(text):
        if max_merges is not None and len(merges) >= max_merges:
            break
        counts = _count_pairs(text)
        best = max(
            counts,
            key=lambda pair: (counts[pair], -max(born.get(part, 0) for part in pair)),
            default=None,
        )
        if best is None or counts[best] < 2:
            break
        born[symbol] = len(merges) + 1
        text = text.replace(best[0] + best[1], symbol)
        merges.append(Merge(symbol, best, counts[best], text))
    return Trace(source, tuple(merges))
