"""BPE-dropout (Provilkov et al. 2020): a word is cut differently each time, so that a model learns of what it is made.

Merges are applied as usual, the earliest learned first, but in each step every possible one is left out with a small
probability; a word is finished when none is left. Each word has a fixed number of such segmentations, drawn once: which
one an example has follows from its own random generator, so that training resumes exactly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from heedful.text.bpe_trace import learned_merges
from heedful.text.tokenizer import Tokenizer

N_SEGMENTATIONS = 64  # of a word


class BPEDropout:
    """Cuts the words of tokenized texts anew, each merge left out with the probability `rate`."""

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        self.rate = rate
        self.ranks = {pair: rank for rank, pair in enumerate(learned_merges(tokenizer))}
        self.pieces = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.special = frozenset(tokenizer.special_tokens.values())
        # No merge crosses a space, so that words can be told by the tokens that begin with one.
        self.starts = [piece.startswith(("Ġ", "▁")) for piece in self.pieces]
        self._cut: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: Sequence[int] | np.ndarray, chance: np.random.Generator) -> list[int]:
        """The ids of the same text, cut anew."""
        found: list[int] = []
        words = self._words(list(map(int, ids)))
        for word, number in zip(words, chance.integers(N_SEGMENTATIONS, size=len(words)).tolist(), strict=True):
            key = (word, number)
            if key not in self._cut:
                self._cut[key] = self._segment(word, number)
            found += self._cut[key]
        return found

    def _words(self, ids: list[int]) -> list[tuple[int, ...]]:
        cuts = [0]
        for place, (before, token) in enumerate(pairwise(ids), start=1):
            if self.starts[token] or token in self.special or before in self.special:
                cuts.append(place)
        return [tuple(ids[a:b]) for a, b in pairwise([*cuts, len(ids)]) if b > a]

    def _segment(self, word: tuple[int, ...], number: int) -> list[int]:
        symbols = list("".join(self.pieces[i] for i in word))
        if word[0] in self.special or not all(symbol in self.ids for symbol in symbols):
            return list(word)
        draw = random.Random(f"{number} {''.join(symbols)}")
        while True:
            left = [
                (self.ranks[pair], place)
                for place, pair in enumerate(pairwise(symbols))
                if pair in self.ranks and draw.random() >= self.rate
            ]
            if not left:
                return [self.ids[symbol] for symbol in symbols]
            _, place = min(left)
            symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
