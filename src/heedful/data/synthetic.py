"""Data that is made, not read, and of which everything is known: for lessons, tests and first steps.

`Reversal`: write a sequence backwards, the task that shows why attention was invented. `Markov`: a source whose
entropy is known exactly, so that a loss can be held against the best there is.

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
    """Sequences of symbols and the same backwards, no two of them equal.

    Symbols are 1 to `n_symbols`; 0 starts the target. With `shortest` the lengths vary from there to `length`. `ends`
    adds the token `n_symbols` + 1 at the end of the target, which a model needs to know when lengths vary. `blanked`
    is the share of the target so far that is hidden in training, each time another (word dropout, Bowman et al. 2016):
    it makes a decoder look at the source.
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
        """Start, symbols, and the end if there is one."""
        return 1 + self.n_symbols + (self.eos_id is not None)

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is cut into examples."""
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
    """Symbols of which each depends on the one before it by a fixed table of probabilities.

    Every draw is new: epochs do not repeat, nothing can be learned by heart, and no model's loss can be below
    `entropy` for long.
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
        """`spread` is the concentration of the probabilities: small is nearly certain, large nearly even."""
        if n_symbols < 2 or length < 1 or n_examples < 1 or spread <= 0:
            raise ValueError("a source has at least 2 symbols, 1 position and 1 example, and a spread above 0")
        self.n_symbols, self.length, self.n_examples, self.seed = n_symbols, length, n_examples, seed
        random = np.random.default_rng(seed)
        table = random.dirichlet(np.full(n_symbols, spread), size=n_symbols)
        self.table = (table + 1e-3) / (1 + 1e-3 * n_symbols)  # (V, V), rows sum to 1, nothing is impossible

    @cached_property
    def stationary(self) -> np.ndarray:
        """How often each symbol comes in the long run: the distribution that the table does not change."""
        equations = np.vstack([self.table.T - np.eye(self.n_symbols), np.ones(self.n_symbols)])
        found: np.ndarray = np.linalg.lstsq(equations, np.eye(self.n_symbols + 1)[-1], rcond=None)[0]
        return found

    @property
    def entropy(self) -> float:
        """Of a symbol when the one before it is known, in nats: the least loss there is."""
        return float(-(self.stationary[:, None] * self.table * np.log(self.table)).sum())

    @property
    def unigram_entropy(self) -> float:
        """Of a symbol when nothing is known before it."""
        return float(-(self.stationary * np.log(self.stationary)).sum())

    @property
    def vocab_size(self) -> int:
        """The number of symbols."""
        return self.n_symbols

    def __len__(self) -> int:
        return self.n_examples

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is cut into examples."""
        return content_digest("markov", self.table, self.length, self.n_examples, self.seed)

    def sequences(self, draws: Sequence[Draw], seed: int) -> np.ndarray:
        """length + 1 symbols for each draw (B, T + 1); the first is drawn from the long run."""
        chance = np.stack([d.random(seed + self.seed).random(self.length + 1) for d in draws])
        steps, begin = np.cumsum(self.table, axis=1), np.cumsum(self.stationary)
        symbols = np.empty(chance.shape, dtype=np.int64)
        symbols[:, 0] = np.searchsorted(begin[:-1], chance[:, 0], side="right")
        for t in range(1, self.length + 1):
            reached = steps[symbols[:, t - 1], :-1]  # (B, V - 1): rounding never leads past the last symbol
            symbols[:, t] = (reached <= chance[:, t, None]).sum(axis=1)
        return symbols

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        symbols = torch.from_numpy(self.sequences(draws, seed))
        return Batch(symbols[:, :-1].contiguous(), targets=symbols[:, 1:].contiguous())
