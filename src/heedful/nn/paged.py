"""A paged key/value cache with shared prefixes (Kwon et al. 2023, "PagedAttention").

Keys and values lie in blocks of a fixed size, in one pool per layer of a fixed number of blocks; a row is a table of
its blocks. So memory is bounded and never moved, rows with a common prefix share blocks, and a row that is repeated
(`select`, `join`) costs nothing until it is written to: a shared block is copied first (copy on write).

Full blocks are kept in the prefix cache under a key: their tokens and the number of the block before. A prompt whose
first blocks are there does not compute them again (`reuse_prefix`). A cached block that no row uses stays until its
memory is needed; the least recently used goes first.

PyTorch's attention wants keys side by side, so `PagedCache.extend` gathers a copy of what a layer holds in each pass.

    B rows, G key/value heads, S cached positions, D head size, N blocks of P positions
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Self

import torch
from torch import Tensor

from heedful.nn.state import Cache, KeyValueState, State, without

PrefixKey = tuple[int, tuple[int, ...]]  # the number of the block before (-1: none), and the tokens in this one
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]  # zeros of a shape and type, on the CPU


class BlockPool:
    """The blocks of all layers: how many rows use each, and what the prefix cache knows of them.

    `allocate` makes a layer's memory on a CPU; there, blocks that were never written to should cost none.
    """

    def __init__(self, n_blocks: int, block_size: int = 16, *, allocate: Allocate | None = None) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {n_blocks} blocks of {block_size} tokens has room for nothing")
        self.n_blocks, self.block_size = n_blocks, block_size
        self.references = [0] * n_blocks
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, each (N, G, P, D)
        self._allocate = allocate
        self._free = list(range(n_blocks))[::-1]  # in no prefix
        self._idle: dict[int, None] = {}  # in a cached prefix but not used, least recently used first
        self._prefixes: dict[PrefixKey, tuple[int, int]] = {}  # a block, and a number that is never given twice
        self._key_of: dict[int, PrefixKey] = {}
        self._numbers = count()

    @property
    def n_used(self) -> int:
        """Blocks that some row uses."""
        return self.n_blocks - len(self._free) - len(self._idle)

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's blocks, allocated when the first keys and values (B, G, T, D) show their size and type."""
        if index not in self.layers:
            self.layers[index] = self._new(k), self._new(v)
        return self.layers[index]

    def _new(self, like: Tensor) -> Tensor:
        shape = self.n_blocks, like.shape[1], self.block_size, like.shape[3]
        if self._allocate is not None and like.device.type == "cpu":
            return self._allocate(shape, like.dtype)
        return like.new_zeros(shape)

    def allocate(self) -> int:
        """A block for one row to write to; RuntimeError if all are in use."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._prefixes[self._key_of.pop(block)]
        else:
            raise RuntimeError(f"all {self.n_blocks} blocks of {self.block_size} tokens are in use")
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more row uses this block."""
        self._idle.pop(block, None)
        self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One row fewer uses each. The last of a sequence become idle first: a prefix is useless without its start."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0
            if self.references[block] == 0 and block in self._key_of:
                self._idle[block] = None
            elif self.references[block] == 0:
                self._free.append(block)

    def copy_on_write(self, block: int) -> int:
        """The block itself if its one user may write to it, else a copy of it."""
        if self.references[block] == 1 and block not in self._key_of:
            return block
        copied = self.allocate()
        for keys, values in self.layers.values():
            keys[copied], values[copied] = keys[block], values[block]
        self.release([block])
        return copied

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest cached prefix of `tokens`."""
        found: list[int] = []
        before = -1
        for piece in self._pieces(tokens):
            if (before, piece) not in self._prefixes:
                break
            block, before = self._prefixes[before, piece]
            found.append(block)
        return found

    def cache_prefix(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Put the full blocks of `table`, which hold these tokens, into the prefix cache."""
        before = -1
        for block, piece in zip(table, self._pieces(tokens), strict=False):
            if (before, piece) not in self._prefixes and block not in self._key_of:
                self._prefixes[before, piece] = block, next(self._numbers)
                self._key_of[block] = before, piece
            if (before, piece) not in self._prefixes:
                return
            before = self._prefixes[before, piece][1]

    def _pieces(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]


class PagedCache(Cache):
    """One layer's part of the pool, in a contiguous cache's place."""

    state: PagedState

    def __init__(self, state: PagedState, index: int) -> None:
        super().__init__(state)
        self.index = index

    def extend(self, k: Tensor, v: Tensor, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, G, T, D) into the rows' blocks; returns a copy of all (B, G, S, D)."""
        end = self.state.n_keys(k.shape[2])
        slots = self.state.slot_mapping(k.shape[2], counts, k.device)
        out = []
        for pool, new in zip(self.state.pool.layer(self.index, k, v), (k, v), strict=True):
            if len(slots.fresh):  # a NaN left in them would spoil sums although it is masked
                pool.index_fill_(0, slots.fresh, 0)
            new = new.transpose(1, 2).flatten(0, 1)  # (B x T, G, D)
            pool[slots.block, :, slots.offset] = new if slots.real is None else new[slots.real]
            seen = pool[slots.tables].transpose(1, 2)  # (B, G, blocks, P, D)
            out.append(seen.flatten(2, 3)[:, :, :end])  # (B, G, S, D)
        return out[0], out[1]

    def reserve(self, n_rows: int, end: int, n_heads: int, size: int) -> tuple[Tensor, Tensor]:
        """The layer's blocks, keys and values, each (N, G, P, D)."""
        found = self.state.pool.layers.get(self.index)
        if found is None:
            like = torch.empty(0, n_heads, 0, size)
            found = self.state.pool.layer(self.index, like, like)
        return found


class SlotMapping(NamedTuple):
    """Where the new tokens of a pass are written, the same for all layers; padding is written nowhere."""

    block: Tensor  # (M,) the block of each token
    offset: Tensor  # (M,) and its place in it
    real: Tensor | None  # (M,) which of B x T tokens they are, None if all
    tables: Tensor  # (B, blocks) every row's blocks, shorter rows filled up with their last
    fresh: Tensor  # blocks that were allocated for this pass


class PagedState(KeyValueState):
    """Rows that are tables of blocks. Several states may share a pool, and `join` moves nothing between them."""

    def __init__(self, pool: BlockPool, n_layers: int, n_rows: int = 0) -> None:
        super().__init__(0, n_rows)
        self.pool = pool
        self.caches = [PagedCache(self, i) for i in range(n_layers)]
        self.tables: list[list[int]] = [[] for _ in range(n_rows)]
        self._slots: tuple[list[int], list[int], SlotMapping] | None = None  # of the pass under way

    def part(self, rows: Sequence[int]) -> Self:
        """These rows as a state over the same blocks; they go on in one of the two, and only that one is freed."""
        part = copy.copy(self)
        part.caches = [PagedCache(part, i) for i in range(len(self.caches))]
        part.tables, part.lengths = [self.tables[row] for row in rows], [self.lengths[row] for row in rows]
        part._slots = None
        return part

    @classmethod
    def concatenated(cls, states: Sequence[PagedState]) -> PagedState:
        """The rows of several states as one, for a single pass; they stay in their own states too (`write_back`)."""
        whole = cls(states[0].pool, len(states[0].caches))
        whole.tables = [table for state in states for table in state.tables]
        whole.lengths = [length for state in states for length in state.lengths]
        return whole

    def write_back(self, states: Sequence[PagedState]) -> None:
        """Give the states of `concatenated` the lengths their rows have after the pass."""
        lengths = iter(self.lengths)
        for state in states:
            state.lengths, state._slots = [next(lengths) for _ in state.lengths], None

    def slot_mapping(self, n: int, counts: list[int] | None, device: torch.device) -> SlotMapping:
        """Where the next n tokens of each row, `counts` of them real, are written; computed once per pass."""
        every = [n] * self.n_rows if counts is None else counts
        if self._slots is None or self._slots[:2] != (self.lengths, every):
            size, fresh = self.pool.block_size, self._prepare(every)
            wide = -(-self.n_keys(n) // size)
            tables = torch.tensor([t + t[-1:] * (wide - len(t)) for t in self.tables], device=device)
            at = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n, device=device)  # (B, n)
            block, offset, real = tables.gather(1, at // size).flatten(), (at % size).flatten(), None
            if counts is not None:
                there = torch.tensor(counts, device=device)[:, None] > torch.arange(n, device=device)
                real = there.flatten().nonzero()[:, 0]
                block, offset = block[real], offset[real]
            new = torch.tensor(fresh, dtype=torch.long, device=device)
            self._slots = list(self.lengths), list(every), SlotMapping(block, offset, real, tables, new)
        return self._slots[2]

    def block_table(self, counts: Sequence[int]) -> Tensor:
        """Every row's blocks (B, blocks), with blocks allocated for `counts` more tokens of each row."""
        self._prepare(counts)
        wide = max(map(len, self.tables))
        return torch.tensor([t + [0] * (wide - len(t)) for t in self.tables])

    def _prepare(self, counts: Sequence[int]) -> list[int]:
        """Make each row's table ready for so many more tokens; returns the blocks that were allocated."""
        self._slots = None
        return [
            block
            for table, length, n in zip(self.tables, self.lengths, counts, strict=True)
            for block in self._extended(table, length, n)
        ]

    def _extended(self, table: list[int], length: int, n: int) -> list[int]:
        size = self.pool.block_size
        kept = -(-length // size)
        self.pool.release(table[kept:])  # left over from before `truncate`
        del table[kept:]
        if length % size:
            table[-1] = self.pool.copy_on_write(table[-1])
        while len(table) * size < length + n:
            table.append(self.pool.allocate())
        return table[kept:]

    def reuse_prefix(self, row: int, tokens: Sequence[int]) -> int:
        """Let a row whose prompt is `tokens` start from their cached prefix, if that is longer than what it has
        computed; returns how many tokens it then has.

        The last token is never taken from the cache, since its logits are wanted.
        """
        found = self.pool.find_prefix(tokens[:-1])
        if len(found) * self.pool.block_size > self.lengths[row]:
            for block in found:
                self.pool.share(block)
            self.pool.release(self.tables[row])
            self.tables[row], self._slots = found, None
            self.lengths[row] = len(found) * self.pool.block_size
        return self.lengths[row]

    def cache_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Put the row's full blocks into the prefix cache, given the tokens it has computed."""
        self.pool.cache_prefix(tokens[: self.lengths[row]], self.tables[row])

    def advance(self, counts: int | Sequence[int]) -> None:
        """Row b has `counts[b]` more tokens."""
        super().advance(counts)
        self._slots = None

    def free(self, row: int) -> None:
        """Empty a row and release its blocks."""
        State.free(self, row)
        self.pool.release(self.tables[row])
        self.tables[row] = []
        self._slots = None

    def _select(self, rows: list[int]) -> None:
        chosen = self._shared(self.tables, rows)
        for table in self.tables:
            self.pool.release(table)
        self.tables, self._slots = chosen, None

    def _join(self, other: Self, rows: list[int]) -> None:
        assert other.pool is self.pool, "blocks of another pool"
        self.tables = self.tables + self._shared(other.tables, rows)
        self._slots = other._slots = None

    def _shared(self, tables: list[list[int]], rows: list[int]) -> list[list[int]]:
        for row in rows:
            for block in tables[row]:
                self.pool.share(block)
        return [list(tables[row]) for row in rows]

    def _drop(self, row: int) -> None:
        self.pool.release(self.tables[row])
        self.tables, self._slots = without(self.tables, row), None
