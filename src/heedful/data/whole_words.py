"""Whole-word masking: which tokens belong to one word, and words chosen at random until enough tokens are.

B rows, T positions, V vocabulary
"""

from __future__ import annotations

import numpy as np

from heedful.text import Tokenizer


def continues_word(tokenizer: Tokenizer) -> np.ndarray:
    """Which tokens continue a word, (V,): WordPiece's "##..."; else all that do not begin with a space."""
    names = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    if any(name.startswith("##") and len(name) > 2 for name in names):
        return np.array([name.startswith("##") and len(name) > 2 for name in names])
    return np.array([not name.startswith(("▁", "Ġ")) for name in names])


def choose_words(inner: np.ndarray, continues: np.ndarray, lot: np.ndarray, n_chosen: np.ndarray) -> np.ndarray:
    """The tokens (B, T) of randomly chosen words, at most `n_chosen` in each row but one word at least.

    `inner` are the tokens that may be chosen, `continues` those that belong to the word before; `lot` is random."""
    place = np.broadcast_to(np.arange(inner.shape[1]), inner.shape)
    before, after = np.zeros_like(inner), np.zeros_like(inner)
    before[:, 1:] = inner[:, :-1]
    starts = inner & ~(continues & before)
    after[:, :-1] = (inner & ~starts)[:, 1:]
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)  # of the word that a token is in
    last = np.minimum.accumulate(np.where(after, inner.shape[1] - 1, place)[:, ::-1], axis=1)[:, ::-1]
    order = np.argsort(np.where(inner, np.take_along_axis(lot, first, axis=1), 2.0), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, place, axis=1)  # words one after the other
    fits = np.take_along_axis(rank, last, axis=1) < n_chosen[:, None]
    chosen: np.ndarray = inner & (fits | (np.take_along_axis(rank, first, axis=1) == 0))
    return chosen
