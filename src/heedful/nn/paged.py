"""A paged KV cache with prefix caching (Kwon et al. 2023, "PagedAttention").

Each layer has a pool of a fixed number of blocks of a fixed size; a row is a block table, the list of its blocks. So
memory is bounded and never moved, rows with a common prefix share blocks, and copying a row (`select`, `append_rows`)
copies no keys or values until one of the copies is written to (copy on write).

The prefix cache maps a full block's tokens and the number of the block before it to the block. A prompt whose first
blocks are cached does not compute them again (`reuse_prefix`). A cached block that no row uses stays until its memory
is needed; the least recently used is evicted first.

PyTorch's attention needs contiguous keys, so `PagedCache.extend` gathers a layer's blocks into a copy in each pass.

    B rows, G key/value heads, S cached positions, D head size, N blocks of P positions
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Self

import torch
from torch import Tensor

from heedful.nn.int8_cache import CacheType, empty_cache, restore_keys_values, store_keys_values
from heedful.nn.state import Cache, CrossCache, KeyValueState, State, swap_remove

PrefixKey = tuple[int, tuple[int, ...]]  # number of the block before (-1: none), tokens of this block
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]  # zeros of a shape and type, on the CPU


class BlockPool:
    """The blocks of all layers, their reference counts and the prefix cache.

    `allocate` allocates a layer's memory on a CPU, ideally so that blocks never written to take none. `kind` is how
    keys and values are stored (None: as they are).
    """

    def __init__(
        self,
        n_blocks: int,
        block_size: int = 16,
        *,
        allocate: Allocate | None = None,
        kind: CacheType | None = None,
    ) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {n_blocks} blocks of {block_size} tokens has room for nothing")
        self.n_blocks, self.block_size, self.kind = n_blocks, block_size, kind
        self.references = [0] * n_blocks
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, each (N, G, P, D), as they are stored
        self._allocate = allocate
        self._free = list(range(n_blocks))[::-1]  # unused and not in the prefix cache
        self._idle: dict[int, None] = {}  # unused but in the prefix cache, least recently used first
        self._prefixes: dict[PrefixKey, tuple[int, int]] = {}  # a block and its number, which is never used again
        self._key_of: dict[int, PrefixKey] = {}
        self._numbers = count()

    @property
    def n_used(self) -> int:
        """Number of blocks in use by some row."""
        return self.n_blocks - self.n_free

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, each (N, G, P, D), allocated on first use with the heads, size and type of k and
        v, which are as they are stored."""
        if index not in self.layers:
            self.layers[index] = self._new(k), self._new(v)
        return self.layers[index]

    def _new(self, like: Tensor) -> Tensor:
        shape = self.n_blocks, like.shape[1], self.block_size, like.shape[3]
        if self._allocate is not None and like.device.type == "cpu":
            return self._allocate(shape, like.dtype)
        return like.new_zeros(shape)

    @property
    def n_free(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """A block for one row to write to, evicting a cached one if none is free; RuntimeError if all are in use."""
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
        """Increment the reference count of a block."""
        self._idle.pop(block, None)
        self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement reference counts, the last block first: it is evicted first, since a prefix needs its beginning."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0
            if self.references[block] == 0 and block in self._key_of:
                self._idle[block] = None
            elif self.references[block] == 0:
                self._free.append(block)

    def copy_on_write(self, block: int) -> int:
        """The block itself if it has one user and is not in the prefix cache, else a copy to write to."""
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
        for piece in self._full_blocks(tokens):
            if (before, piece) not in self._prefixes:
                break
            block, before = self._prefixes[before, piece]
            found.append(block)
        return found

    def cache_prefix(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Put the full blocks of `table`, which hold these tokens, into the prefix cache."""
        before = -1
        for block, piece in zip(table, self._full_blocks(tokens), strict=False):
            if (before, piece) not in self._prefixes and block not in self._key_of:
                self._prefixes[before, piece] = block, next(self._numbers)
                self._key_of[block] = before, piece
            if (before, piece) not in self._prefixes:
                return
            before = self._prefixes[before, piece][1]

    def _full_blocks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens of each full block."""
        size = self.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]


class PagedCache(Cache):
    """One layer of the pool, with the interface of a contiguous cache."""

    state: PagedState

    def __init__(self, state: PagedState, index: int) -> None:
        super().__init__(state, state.pool.kind)
        self.index = index

    def extend(self, k: Tensor, v: Tensor, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, G, T, D) to the rows' blocks; returns a contiguous copy of all (B, G, S, D)."""
        end, dtype = self.state.n_keys(k.shape[2]), k.dtype
        slots = self.state.slot_mapping(k.shape[2], counts, k.device)
        k, v = store_keys_values(k, v, self.kind)
        out = []
        for pool, new in zip(self.state.pool.layer(self.index, k, v), (k, v), strict=True):
            if len(slots.fresh):  # a NaN left in them would spread although masked (0 · NaN is NaN)
                pool.index_fill_(0, slots.fresh, 0)
            new = new.transpose(1, 2).flatten(0, 1)  # (B x T, G, D)
            pool[slots.block, :, slots.offset] = new if slots.real is None else new[slots.real]
            gathered = pool[slots.tables].transpose(1, 2)  # (B, G, blocks, P, D)
            out.append(gathered.flatten(2, 3)[:, :, :end])  # (B, G, S, D)
        return restore_keys_values(out[0], out[1], self.kind, dtype)

    def reserve(self, n_rows: int, end: int, n_heads: int, size: int) -> tuple[Tensor, Tensor]:
        """The layer's blocks, keys and values, each (N, G, P, D)."""
        found = self.state.pool.layers.get(self.index)
        if found is None:
            like = empty_cache(n_heads, size, self.kind)
            found = self.state.pool.layer(self.index, like, like)
        return found


class SlotMapping(NamedTuple):
    """Where the new tokens of a pass are written, the same for all layers; padding is not written."""

    block: Tensor  # (M,) the block of each token
    offset: Tensor  # (M,) its position in the block
    real: Tensor | None  # (M,) indices of the real tokens among B x T, None if all are real
    tables: Tensor  # (B, blocks) block tables, shorter ones padded with their last block
    fresh: Tensor  # blocks allocated for this pass


class PagedState(KeyValueState):
    """Rows as block tables. Several states may share a pool; `append_rows` between them copies no keys or values.

    With `cross`, for an encoder-decoder, the keys and values of cross-attention are contiguous, and no prefix is
    shared: what a block holds depends on the source.
    """

    def __init__(self, pool: BlockPool, n_layers: int, n_rows: int = 0, *, cross: bool = False) -> None:
        super().__init__(0, n_rows)
        self.pool = pool
        self.cross = [CrossCache(pool.kind) for _ in range(n_layers)] if cross else []
        self.caches = [PagedCache(self, i) for i in range(n_layers)]
        self.tables: list[list[int]] = [[] for _ in range(n_rows)]
        self._slots: tuple[list[int], list[int], SlotMapping] | None = None  # of the pass under way

    def subset(self, rows: Sequence[int]) -> Self:
        """A state that aliases these rows' block tables, without counting references: only one of the two may continue
        and be freed."""
        part = copy.copy(self)
        part.caches = [PagedCache(part, i) for i in range(len(self.caches))]
        part.tables, part.lengths = [self.tables[row] for row in rows], [self.lengths[row] for row in rows]
        part._slots, part.cross = None, [copy.copy(cache) for cache in self.cross]
        part._select_memory(list(rows))
        return part

    @classmethod
    def concatenated(cls, states: Sequence[PagedState]) -> PagedState:
        """A state that aliases the rows of several, for a single pass; `write_back` then updates their lengths."""
        whole = cls(states[0].pool, len(states[0].caches))
        whole.tables = [table for state in states for table in state.tables]
        whole.lengths = [length for state in states for length in state.lengths]
        return whole

    def write_back(self, states: Sequence[PagedState]) -> None:
        """Copy the lengths after the pass to the states given to `concatenated`."""
        lengths = iter(self.lengths)
        for state in states:
            state.lengths, state._slots = [next(lengths) for _ in state.lengths], None

    def slot_mapping(self, n: int, counts: list[int] | None, device: torch.device) -> SlotMapping:
        """Slots of the next n tokens of each row, of which `counts` are real; computed once per pass."""
        every = [n] * self.n_rows if counts is None else counts
        if self._slots is None or self._slots[:2] != (self.lengths, every):
            size, fresh = self.pool.block_size, self.prepare(every)
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
        """Block tables (B, blocks), after allocating for `counts` more tokens of each row."""
        self.prepare(counts)
        wide = max(map(len, self.tables))
        return torch.tensor([t + [0] * (wide - len(t)) for t in self.tables])

    def prepare(self, counts: Sequence[int]) -> list[int]:
        """Allocate blocks for this many more tokens of each row; returns the new ones."""
        self._slots = None
        return [
            block
            for table, length, n in zip(self.tables, self.lengths, counts, strict=True)
            for block in self._extend_table(table, length, n)
        ]

    def _extend_table(self, table: list[int], length: int, n: int) -> list[int]:
        """Make a row's block table ready for n more tokens; returns the blocks that were allocated."""
        size = self.pool.block_size
        kept = -(-length // size)
        self.pool.release(table[kept:])  # no longer needed after `truncate`
        del table[kept:]
        if length % size:
            table[-1] = self.pool.copy_on_write(table[-1])
        while len(table) * size < length + n:
            table.append(self.pool.allocate())
        return table[kept:]

    def reuse_prefix(self, row: int, tokens: Sequence[int]) -> int:
        """Use the cached prefix of the prompt `tokens` if it is longer than what the row has computed.

        Returns the row's length. The last token is always computed, since its logits are needed.
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
        """Put the row's full blocks into the prefix cache; `tokens` are the row's tokens from the start."""
        if not self.cross:
            self.pool.cache_prefix(tokens[: self.lengths[row]], self.tables[row])

    def advance(self, counts: int | Sequence[int]) -> None:
        """Add `counts[b]` tokens to the length of row b."""
        super().advance(counts)
        self._slots = None

    def free(self, row: int) -> None:
        """Empty a row and release its blocks."""
        State.free(self, row)
        self.pool.release(self.tables[row])
        self.tables[row] = []
        self._slots = None

    def _select(self, rows: list[int]) -> None:
        chosen = self._share_tables(self.tables, rows)
        for table in self.tables:
            self.pool.release(table)
        self.tables, self._slots = chosen, None
        self._select_memory(rows)

    def _append_rows(self, other: Self, rows: list[int]) -> None:
        assert other.pool is self.pool, "blocks of another pool"
        self._append_memory(other, rows)
        self.tables = self.tables + self._share_tables(other.tables, rows)
        self._slots = other._slots = None

    def _share_tables(self, tables: list[list[int]], rows: list[int]) -> list[list[int]]:
        for row in rows:
            for block in tables[row]:
                self.pool.share(block)
        return [list(tables[row]) for row in rows]

    def _remove_row(self, row: int) -> None:
        self.pool.release(self.tables[row])
        self.tables, self._slots = swap_remove(self.tables, row), None
        self._remove_memory(row)
