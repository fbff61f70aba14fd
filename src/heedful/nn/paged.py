"""A paged key/value cache with shared prefixes (Kwon et al. 2023, "PagedAttention").

Keys and values lie in blocks of a fixed size, in one pool per layer of a fixed number of blocks; a row is a table of
its blocks. So memory is bounded and never moved, rows that begin alike share blocks, and a row that is repeated
(`select`, `join`) costs nothing until it is written to: a block that others see as well is copied first.

Full blocks get a name: the tokens in them and the name of the block before. A prompt whose first blocks have names is
not read again (`adopt`). A named block that no row uses stays until room is needed; the least recently used goes first.

Our kernels (kernels/cpu/decode.py) follow the tables. PyTorch's want keys side by side, so that way each pass gathers
a copy of what a layer remembers.

    B rows, G key/value heads, S remembered positions, D head size, N blocks of P positions
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Self

import torch
from torch import Tensor

from heedful.kernels.cpu.memory import huge_zeros
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
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, each (N, G, P, D)

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self._free) - len(self._idle)

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's blocks, made when the first keys and values (B, G, T, D) show their size and type.

        On a CPU blocks that nobody has used yet take no memory.
        """
        if index not in self.layers:
            self.layers[index] = self._room(k), self._room(v)
        return self.layers[index]

    def _room(self, like: Tensor) -> Tensor:
        shape = self.n_blocks, like.shape[1], self.block, like.shape[3]
        return huge_zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_empty(shape)

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
        for keys, values in self.layers.values():
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
        blocks = self.state.blocks(k.shape[2], k.device)
        out = []
        for pool, new in zip(self.state.pool.layer(self.index, k, v), (k, v), strict=True):
            if len(blocks.fresh):  # what is left in them may be no number, and spoils sums although it is masked
                pool.index_fill_(0, blocks.fresh, 0)
            new = new.transpose(1, 2).flatten(0, 1)  # (B x T, G, D)
            pool[blocks.of, :, blocks.at] = new if blocks.real is None else new[blocks.real]
            seen = pool[blocks.tables].transpose(1, 2)  # (B, G, blocks, P, D)
            out.append(seen.flatten(2, 3)[:, :, :end])  # (B, G, S, D)
        return out[0], out[1]

    def room(self, n_rows: int, end: int, n_heads: int, size: int) -> tuple[Tensor, Tensor]:
        found = self.state.pool.layers.get(self.index)
        if found is None:
            like = torch.empty(0, n_heads, 0, size)
            found = self.state.pool.layer(self.index, like, like)
        return found


class Blocks(NamedTuple):
    """Where the new tokens of a pass go, the same for all layers; tokens that are padding go nowhere."""

    of: Tensor  # (M,) the block of each token
    at: Tensor  # (M,) and its place in it
    real: Tensor | None  # (M,) which of B x T tokens they are, None if all
    tables: Tensor  # (B, blocks) every row's blocks, shorter rows filled up with their last
    fresh: Tensor  # blocks that were taken for this pass


class PagedState(KeyValueState):
    """Rows that are tables of blocks. Several states may share a pool, and `join` moves nothing between them."""

    def __init__(self, pool: Pool, n_layers: int, n_rows: int = 0) -> None:
        super().__init__(0, n_rows)
        self.pool = pool
        self.caches = [PagedCache(self, i) for i in range(n_layers)]
        self.tables: list[list[int]] = [[] for _ in range(n_rows)]
        self._pass: tuple[list[int], list[int], Blocks] | None = None

    def part(self, rows: Sequence[int]) -> Self:
        """The same blocks, not a second time: rows go on in the part or here, and only one of the two is let go."""
        part = copy.copy(self)
        part.caches = [PagedCache(part, i) for i in range(len(self.caches))]
        part.tables, part.lengths = [self.tables[row] for row in rows], [self.lengths[row] for row in rows]
        part._pass = None
        return part

    @classmethod
    def beside(cls, states: Sequence[PagedState]) -> PagedState:
        """The rows of several states as one, for a pass; they stay where they are as well (see `apart`)."""
        whole = cls(states[0].pool, len(states[0].caches))
        whole.tables = [table for state in states for table in state.tables]
        whole.lengths = [length for state in states for length in state.lengths]
        return whole

    def apart(self, states: Sequence[PagedState]) -> None:
        """Let those of `beside` know what their rows have become."""
        lengths = iter(self.lengths)
        for state in states:
            state.lengths, state._pass = [next(lengths) for _ in state.lengths], None

    def blocks(self, n: int, device: torch.device) -> Blocks:
        """Where the next n tokens of each row go. Blocks are taken, or made the row's own, as needed; once per pass."""
        counts = [n] * self.n_rows if self.real is None else self.real
        if self._pass is None or self._pass[:2] != (self.lengths, counts):
            size, fresh = self.pool.block, self._prepare(counts)
            wide = -(-self.n_keys(n) // size)
            tables = torch.tensor([t + t[-1:] * (wide - len(t)) for t in self.tables], device=device)
            at = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n, device=device)  # (B, n)
            of, at, real = tables.gather(1, at // size).flatten(), (at % size).flatten(), None
            if self.real is not None:
                there = torch.tensor(counts, device=device)[:, None] > torch.arange(n, device=device)
                real = there.flatten().nonzero()[:, 0]
                of, at = of[real], at[real]
            new = torch.tensor(fresh, dtype=torch.long, device=device)
            self._pass = list(self.lengths), list(counts), Blocks(of, at, real, tables, new)
        return self._pass[2]

    def table(self, n: int) -> Tensor:
        """Every row's blocks (B, blocks), ready for n more tokens of each row, for one who follows and fills them."""
        self._prepare([n] * self.n_rows if self.real is None else self.real)
        wide = max(map(len, self.tables))
        return torch.tensor([t + [0] * (wide - len(t)) for t in self.tables])

    def _prepare(self, counts: Sequence[int]) -> list[int]:
        """Make each row's table ready for so many more tokens; the blocks that are added."""
        self._pass = None
        return [
            block
            for table, length, n in zip(self.tables, self.lengths, counts, strict=True)
            for block in self._extended(table, length, n)
        ]

    def _extended(self, table: list[int], length: int, n: int) -> list[int]:
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
        """Let a row that is reading `tokens` go on from what is known of them, if that is more than it has read; how
        many of them it has then.

        The last token is always left to read, since what follows it is what one wants to know.
        """
        found = self.pool.find(tokens[:-1])
        if len(found) * self.pool.block > self.lengths[row]:
            for block in found:
                self.pool.share(block)
            self.pool.release(self.tables[row])
            self.tables[row], self._pass = found, None
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
