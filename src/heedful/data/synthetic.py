"""Synthetic datasets: sequence reversal and Markov chains.

`Reversal` is the task that shows the benefit of attention in recurrent encoder-decoders. `MarkovChain` has a known
entropy, so that a loss can be compared with the optimum.

    B examples, T positions, V symbols
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from heedful.data.dataset import Draw
from heedful.data.pairs import pair_batch
from heedful.data.ragged import Ids, content_digest
from heedful.models.base import Batch


class Reversal:
    """Distinct random sequences as sources, and their reversals as targets.

    Symbols are 1 to `n_symbols`; 0 is the start token. With `shortest`, lengths vary from there to `length`. `ends`
    appends an end token, `n_symbols` + 1, to the target, needed when lengths vary. `blanked` is the rate of word
    dropout on the decoder's inputs (Bowman et al. 2016), which makes the decoder attend to the source.
    """

    start_id = 0

    def __init__(
        self,
        n_symbols: int = 10,
        length: int = 4,
        n_examples: int = 2000,
        seed: int = 0,
        *,
        shortest: int | None = None,
        ends: bool = False,
        blanked: float = 0.0,
    ) -> None:
        shortest = length if shortest is None else shortest
        if not 1 <= shortest <= length:
            raise ValueError(f"lengths from {shortest} to {length}: the shortest is 1 to the longest")
        possible = sum(n_symbols**n for n in range(shortest, length + 1))
        if not 1 <= n_examples <= possible:
            raise ValueError(
                f"{n_examples} different sequences of {n_symbols} symbols: there are {possible} of this length"
            )
        self.n_symbols, self.length, self.blanked = n_symbols, length, blanked
        self.eos_id = n_symbols + 1 if ends else None
        generator = torch.Generator().manual_seed(seed)
        found: dict[tuple[int, ...], None] = {}
        while len(found) < n_examples:
            n = length
            if shortest < length:
                n = int(torch.randint(shortest, length + 1, (), generator=generator))
            row = torch.randint(1, 1 + n_symbols, (n,), generator=generator)
            found[tuple(row.tolist())] = None
        self.sources: list[Ids] = [np.array(row, dtype=np.int64) for row in found]

    @property
    def vocab_size(self) -> int:
        """The symbols, the start token, and the end token if there is one."""
        return 1 + self.n_symbols + (self.eos_id is not None)

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("reversal", *self.sources, self.eos_id, self.blanked)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        """The length of each example in tokens, for batches of similar lengths."""
        lengths = np.array([len(s) for s in self.sources])
        return None if lengths.min() == lengths.max() else lengths

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        sources = [self.sources[d.index] for d in draws]
        batch = pair_batch(sources, [s[::-1] for s in sources], self.start_id, self.eos_id)
        if self.blanked:
            n = batch.ids.shape[1]
            hidden = np.stack([d.random(seed).random(n) < self.blanked for d in draws])
            batch.tokens = batch.ids.masked_fill(torch.from_numpy(hidden), self.start_id)
        return batch


class MarkovChain:
    """Sequences of a first-order Markov chain with a random transition matrix.

    Every draw is a new sequence, so nothing can be memorized, and the expected loss of any model is at least `entropy`.
    """

    lengths: None = None

    def __init__(
        self,
        n_symbols: int = 8,
        length: int = 32,
        n_examples: int = 2000,
        seed: int = 0,
        *,
        spread: float = 0.5,
    ) -> None:
        """`spread` is the concentration of the Dirichlet prior: small for nearly deterministic, large for uniform."""
        if n_symbols < 2 or length < 1 or n_examples < 1 or spread <= 0:
            raise ValueError("a source has at least 2 symbols, 1 position and 1 example, and a spread above 0")
        self.n_symbols, self.length, self.n_examples, self.seed = n_symbols, length, n_examples, seed
        random = np.random.default_rng(seed)
        table = random.dirichlet(np.full(n_symbols, spread), size=n_symbols)
        self.table = (table + 1e-3) / (1 + 1e-3 * n_symbols)  # (V, V), rows sum to 1, none is 0

    @cached_property
    def stationary(self) -> np.ndarray:
        """The stationary distribution (V,) of the chain."""
        equations = np.vstack([self.table.T - np.eye(self.n_symbols), np.ones(self.n_symbols)])
        found: np.ndarray = np.linalg.lstsq(equations, np.eye(self.n_symbols + 1)[-1], rcond=None)[0]
        return found

    @property
    def entropy(self) -> float:
        """The entropy rate, in nats per symbol: the least possible cross-entropy."""
        return float(-(self.stationary[:, None] * self.table * np.log(self.table)).sum())

    @property
    def unigram_entropy(self) -> float:
        """The entropy of the stationary distribution, in nats: the loss without context."""
        return float(-(self.stationary * np.log(self.stationary)).sum())

    @property
    def vocab_size(self) -> int:
        """The number of symbols."""
        return self.n_symbols

    def __len__(self) -> int:
        return self.n_examples

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("markov", self.table, self.length, self.n_examples, self.seed)

    def sequences(self, draws: Sequence[Draw], seed: int) -> np.ndarray:
        """length + 1 symbols for each draw (B, T + 1); the first is from the stationary distribution."""
        chance = np.stack([d.random(seed + self.seed).random(self.length + 1) for d in draws])
        steps, begin = np.cumsum(self.table, axis=1), np.cumsum(self.stationary)
        symbols = np.empty(chance.shape, dtype=np.int64)
        symbols[:, 0] = np.searchsorted(begin[:-1], chance[:, 0], side="right")
        for t in range(1, self.length + 1):
            reached = steps[symbols[:, t - 1], :-1]  # (B, V - 1): without the last, so that rounding cannot exceed it
            symbols[:, t] = (reached <= chance[:, t, None]).sum(axis=1)
        return symbols

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        symbols = torch.from_numpy(self.sequences(draws, seed))
        return Batch(symbols[:, :-1].contiguous(), targets=symbols[:, 1:].contiguous())
