"""A paged key/value cache with shared prefixes (Kwon et al. 2023, "PagedAttention").

Keys and values lie in blocks of a fixed size, in one pool per layer of a fixed number of blocks; a row is a table of
its blocks. So memory is bounded and never moved, rows that begin alike share blocks, and a row that is repeated
(`select`, `join`) costs nothing until it is written to: a block that others see as well is copied first.

Full blocks get a name: the tokens in them and the name of the block before. A prompt whose first blocks have names is
not read again (`adopt`). A named block that no row uses stays until room is needed; the least recently used goes first.

Where we differ: PyTorch's kernels want keys side by side, so each pass gathers a copy of what a layer remembers.

    B rows, G key/value heads, S remembered positions, D head size, N blocks of P positions
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Self

import torch
from torch import Tensor

from heedful.nn.state import Cache, KeyValueState, State, without

Name = tuple[int, tuple[int, ...]]  # the number of the block before (-1: none), and the tokens in this one


class Pool:
    """The blocks: who uses them, what is in them."""

    def __init__(self, n_blocks: int, block: int = 16) -> None:
        if n_blocks < 1 or block < 1:
            raise ValueError(f"a pool of {n_blocks} blocks of {block} tokens has room for nothing")
        self.n_blocks, self.block = n_blocks, block
        self.users = [0] * n_blocks
        self._free = list(range(n_blocks))[::-1]  # never named
        self._idle: dict[int, None] = {}  # named but not used, least recently used first
        self._named: dict[Name, tuple[int, int]] = {}  # its block, and a number that is never given twice
        self._name_of: dict[int, Name] = {}
        self._numbers = count()
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, each (N, P, G, D)

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self._free) - len(self._idle)

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's blocks, made when the first keys and values (B, G, T, D) show their size and type."""
        if index not in self._layers:
            self._layers[index] = (
                k.new_zeros(self.n_blocks, self.block, k.shape[1], k.shape[3]),
                v.new_zeros(self.n_blocks, self.block, v.shape[1], v.shape[3]),
            )
        return self._layers[index]

    def take(self) -> int:
        """A block for one user to write to."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._named[self._name_of.pop(block)]
        else:
            raise RuntimeError(f"all {self.n_blocks} blocks of {self.block} tokens are in use")
        self.users[block] = 1
        return block

    def share(self, block: int) -> None:
        self._idle.pop(block, None)
        self.users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One user fewer for each. The last of a sequence become idle first: without its beginning it is worthless."""
        for block in reversed(blocks):
            self.users[block] -= 1
            assert self.users[block] >= 0
            if self.users[block] == 0 and block in self._name_of:
                self._idle[block] = None
            elif self.users[block] == 0:
                self._free.append(block)

    def own(self, block: int) -> int:
        """The block if its one user may write to it, else a copy."""
        if self.users[block] == 1 and block not in self._name_of:
            return block
        copy = self.take()
        for keys, values in self._layers.values():
            keys[copy], values[copy] = keys[block], values[block]
        self.release([block])
        return copy

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning of `tokens`."""
        found: list[int] = []
        before = -1
        for name in self._names(tokens):
            if (before, name) not in self._named:
                break
            block, before = self._named[before, name]
            found.append(block)
        return found

    def name(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Note that the blocks of `table` hold these tokens; only full ones can be found again."""
        before = -1
        for block, name in zip(table, self._names(tokens), strict=False):
            if (before, name) not in self._named and block not in self._name_of:
                self._named[before, name] = block, next(self._numbers)
                self._name_of[block] = before, name
            if (before, name) not in self._named:
                return
            before = self._named[before, name][1]

    def _names(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]


class PagedCache(Cache):
    """One layer's part of the pool, in a contiguous cache's place."""

    state: PagedState

    def __init__(self, state: PagedState, index: int) -> None:
        super().__init__(state)
        self.index = index

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.state.n_keys(k.shape[2])
        places, tables, fresh = self.state.blocks(k.shape[2], k.device)
        out = []
        for pool, new in zip(self.state.pool.layer(self.index, k, v), (k, v), strict=True):
            if len(fresh):  # what is left in them may be no number, and spoils sums although it is masked
                pool.index_fill_(0, fresh, 0)
            pool.flatten(0, 1).index_copy_(0, places, new.transpose(1, 2).flatten(0, 1))  # (B x T, G, D)
            out.append(pool[tables].flatten(1, 2)[:, :end].transpose(1, 2))  # (B, G, S, D)
        return out[0], out[1]


class PagedState(KeyValueState):
    """Rows that are tables of blocks. Several states may share a pool, and `join` moves nothing between them."""

    def __init__(self, pool: Pool, n_layers: int, n_rows: int = 0) -> None:
        super().__init__(0, n_rows)
        self.pool = pool
        self.caches = [PagedCache(self, i) for i in range(n_layers)]
        self.tables: list[list[int]] = [[] for _ in range(n_rows)]
        self._pass: tuple[list[int], int, Tensor, Tensor, Tensor] | None = None

    def blocks(self, n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Where the next n tokens of each row go (B x n) among all positions, every row's blocks (B, blocks), shorter
        rows filled up with their last, and which blocks are new.

        Blocks are taken, or made the row's own, as needed; once per pass, for all layers.
        """
        if self._pass is None or self._pass[0] != self.lengths or self._pass[1] != n:
            size = self.pool.block
            pairs = zip(self.tables, self.lengths, strict=True)
            fresh = [block for table, length in pairs for block in self._prepare(table, length, n)]
            wide = -(-self.n_keys(n) // size)
            tables = torch.tensor([t + t[-1:] * (wide - len(t)) for t in self.tables], device=device)
            at = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n, device=device)  # (B, n)
            places = (tables.gather(1, at // size) * size + at % size).flatten()
            new = torch.tensor(fresh, dtype=torch.long, device=device)
            self._pass = list(self.lengths), n, places, tables, new
        return self._pass[2:]

    def _prepare(self, table: list[int], length: int, n: int) -> list[int]:
        """Make a row's table ready for n more tokens; the blocks that are added."""
        size = self.pool.block
        kept = -(-length // size)
        self.pool.release(table[kept:])  # left over from before `truncate`
        del table[kept:]
        if length % size:
            table[-1] = self.pool.own(table[-1])
        while len(table) * size < length + n:
            table.append(self.pool.take())
        return table[kept:]

    def adopt(self, row: int, tokens: Sequence[int]) -> int:
        """Let an empty row begin with what is known of `tokens`; how many of them need not be read.

        The last token is always left to read, since what follows it is what one wants to know.
        """
        assert self.lengths[row] == 0 and not self.tables[row]
        found = self.pool.find(tokens[:-1])
        for block in found:
            self.pool.share(block)
        self._pass = None
        self.tables[row] = found
        self.lengths[row] = len(found) * self.pool.block
        return self.lengths[row]

    def publish(self, row: int, tokens: Sequence[int]) -> None:
        """Let others find what this row remembers, given the tokens it has read."""
        self.pool.name(tokens[: self.lengths[row]], self.tables[row])

    def advance(self, counts: int | Sequence[int]) -> None:
        super().advance(counts)
        self._pass = None

    def free(self, row: int) -> None:
        State.free(self, row)
        self.pool.release(self.tables[row])
        self.tables[row] = []
        self._pass = None

    def _select(self, rows: list[int]) -> None:
        chosen = self._shared(self.tables, rows)
        for table in self.tables:
            self.pool.release(table)
        self.tables, self._pass = chosen, None

    def _join(self, other: Self, rows: list[int]) -> None:
        assert other.pool is self.pool, "blocks of another pool"
        self.tables = self.tables + self._shared(other.tables, rows)
        self._pass = other._pass = None

    def _shared(self, tables: list[list[int]], rows: list[int]) -> list[list[int]]:
        for row in rows:
            for block in tables[row]:
                self.pool.share(block)
        return [list(tables[row]) for row in rows]

    def _drop(self, row: int) -> None:
        self.pool.release(self.tables[row])
        self.tables, self._pass = without(self.tables, row), None
