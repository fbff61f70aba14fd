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

A trained tokenizer (Sennrich et al. 2016) has learned its merges once, from other text, and applies them within each
word, the earliest learned first: `trace_tokenizer`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from heedful.text.tokenizer import Tokenizer


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


@dataclass(frozen=True)
class WordTrace:
    """How a trained tokenizer merges a word: its symbols, then after each merge its rank and the symbols left."""

    symbols: tuple[str, ...]
    merges: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def pieces(self) -> tuple[str, ...]:
        """The symbols after the last merge."""
        return self.merges[-1][1] if self.merges else self.symbols

    def __str__(self) -> str:
        steps = [f"{rank + 1:>7}  {' '.join(symbols)}" for rank, symbols in self.merges]
        return "\n".join([f"{'':>7}  {' '.join(self.symbols)}", *steps])


def learned_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a trained BPE tokenizer, in the order in which they were learned; ValueError of another kind."""
    model = json.loads(tokenizer.backend.to_str())["model"]
    if model["type"] != "BPE" or not model["merges"]:
        kind = model["type"] if model["type"] != "BPE" else "tokenizer of single characters or bytes"
        raise ValueError(f"a {kind} has no merges: give a tokenizer of byte-pair encoding")
    return [(a, b) for a, b in (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])]


def trace_tokenizer(tokenizer: Tokenizer, text: str) -> list[WordTrace]:
    """Every word of a text, cut and normalized as the tokenizer does it, with its merges."""
    ranks = {pair: rank for rank, pair in enumerate(learned_merges(tokenizer))}
    backend = tokenizer.backend
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        words = [text] if text else []
    else:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    suffix = backend.model.end_of_word_suffix or ""
    return [_trace_word((*word[:-1], word[-1] + suffix), ranks) for word in words]


def _trace_word(symbols: tuple[str, ...], ranks: dict[tuple[str, str], int]) -> WordTrace:
    """Apply the earliest learned merge that a word has, everywhere in it, until it has none."""
    left, merges = symbols, list[tuple[int, tuple[str, ...]]]()
    while True:
        pairs = set(pairwise(left)) & ranks.keys()
        if not pairs:
            return WordTrace(symbols, tuple(merges))
        best = min(pairs, key=lambda pair: ranks[pair])
        joined: list[str] = []
        at = 0
        while at < len(left):
            found = left[at : at + 2] == best
            joined.append("".join(best) if found else left[at])
            at += 2 if found else 1
        left = tuple(joined)
        merges.append((ranks[best], left))
