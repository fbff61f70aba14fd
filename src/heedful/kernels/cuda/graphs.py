"""Decode steps as CUDA graphs: the launches of a whole step are recorded once and replayed as one.

A step of a small model is hundreds of launches of a few microseconds each, and Python takes longer to issue one than
the GPU to run it. `DecodeGraphs` records `model.step` on a `GraphState` for a number of rows, with the choice of the
most likely token as its last operation, so that the next step can follow without the host: the host reads the tokens of
a step while the GPU computes the one after it. A batch that changed meanwhile (a row ended, another came) repeats that
step.

    B rows, W blocks in a table, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heedful.kernels.cuda.decode import CudaStack
from heedful.kernels.cuda.sampling import choose_greedy
from heedful.kernels.cuda.state import GraphState
from heedful.models.base import DecoderModel
from heedful.nn.paged import BlockPool, PagedState

NARROW = 16  # blocks in the smallest table; a stack without kernels attends to all positions of its table


@dataclass(eq=False)
class Recorded:
    """A step for a number of rows: its inputs and outputs on the device, and its graphs."""

    tables: Tensor  # (B, W)
    numbers: Tensor  # (2, B) tokens and lengths; replaced by the next ones at the end of a step
    chosen: Tensor  # (2, B) in float64: the most likely tokens and their logits
    logits: Tensor | None = None  # (B, V)
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class Launched:
    """A step under way: whose rows it is for, and where its tokens will be."""

    recorded: Recorded
    tables: list[list[int]]  # the rows' block tables, the same objects as the state's
    lengths: list[int]
    done: torch.cuda.Event
    chosen: Tensor  # (2, B) on the host
    tokens: list[int] = field(default_factory=list)  # the inputs, where they are known


class DecodeGraphs:
    """The graphs of a model for the rows of a pool's states."""

    def __init__(self, model: DecoderModel, pool: BlockPool) -> None:
        self.model, self.pool = model, pool
        self.n_layers = len(model.decoder.blocks)
        self.unused = pool.allocate()  # where rows that are not in use write to
        self.fused = isinstance(model.decoder, CudaStack)
        longest = min(model.context_length or 2**30, pool.n_blocks * pool.block_size)
        self.widest = -(-longest // pool.block_size)
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._memory: Any = None  # shared by all graphs: one runs at a time
        self._launched: Launched | None = None

    # --- a step ------------------------------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int], state: PagedState) -> Tensor:
        """Logits (B, V) after one more token of each row; to be read before the next step."""
        self._launched = None
        recorded = self._prepare(tokens, state, 1)
        self._replay(recorded)
        state.advance(1)
        assert recorded.logits is not None
        return recorded.logits[: len(tokens)]

    def greedy(self, tokens: Sequence[int], state: PagedState) -> tuple[list[int], list[float]]:
        """The most likely token after one more token of each row, and its logit; the step after it is launched too."""
        now = self._launched
        if now is None or not self._is_for(now, tokens, state):
            now = self._launch(self._prepare(tokens, state, 2), state.tables, state.lengths)
        self._launched = self._follow(now)
        state.advance(1)
        now.done.synchronize()
        chosen, highest = now.chosen[:, : len(tokens)].tolist()
        found = [int(token) if math.isfinite(top) else 0 for token, top in zip(chosen, highest, strict=True)]
        if self._launched is not None:
            self._launched.tokens = found
        return found, highest

    @staticmethod
    def _is_for(launched: Launched, tokens: Sequence[int], state: PagedState) -> bool:
        """Whether these rows are those that the step was launched for."""
        return (
            launched.lengths == state.lengths
            and launched.tokens == list(tokens)
            and all(a is b for a, b in zip(launched.tables, state.tables, strict=True))
        )

    def _follow(self, step: Launched) -> Launched | None:
        """Launch the step after this one, if there is a position for its tokens in every row."""
        lengths = [n + 1 for n in step.lengths]
        size, changed = self.pool.block_size, []
        if max(lengths) >= self.widest * size or (self.model.context_length or 2**30) <= max(lengths):
            return None
        wide = step.recorded.tables.shape[1]
        for row, (table, n) in enumerate(zip(step.tables, lengths, strict=True)):
            if len(table) * size < n + 1:
                if len(table) == wide or not self.pool.n_free:
                    return None
                table.append(self.pool.allocate())
                changed.append((row, len(table) - 1, table[-1]))
        for row, at, block in changed:
            self._clear([block])
            step.recorded.tables[row, at] = block
        return self._launch(step.recorded, step.tables, lengths)

    def _launch(self, recorded: Recorded, tables: list[list[int]], lengths: list[int]) -> Launched:
        self._replay(recorded)
        host = torch.empty(recorded.chosen.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(recorded.chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(recorded, list(tables), list(lengths), done, host)

    # --- inputs ------------------------------------------------------------------------------------------------------

    def _prepare(self, tokens: Sequence[int], state: PagedState, ahead: int) -> Recorded:
        """Allocate blocks for the next tokens, and put tokens, lengths and block tables on the device."""
        n_rows, longest = len(tokens), self.widest * self.pool.block_size
        n_new = [min(ahead, longest - length) for length in state.lengths]
        fresh = state.prepare(n_new if self.pool.n_free >= 2 * n_rows else [1] * n_rows)
        self._clear(fresh)
        wide = max(map(len, state.tables))
        width = self.widest if self.fused else min(self.widest, max(NARROW, 1 << (wide - 1).bit_length()))
        recorded = self._slot(1 << (n_rows - 1).bit_length(), width)
        n_slots = len(recorded.tables)
        spare = n_slots - n_rows
        rows = [table + [self.unused] * (width - len(table)) for table in state.tables] + [
            [self.unused] * width
        ] * spare
        recorded.tables.copy_(torch.tensor(rows), non_blocking=True)
        recorded.numbers.copy_(torch.tensor([[*tokens, *[0] * spare], [*state.lengths, *[0] * spare]]))
        return recorded

    def _clear(self, blocks: list[int]) -> None:
        """Zero new blocks where masked positions are multiplied too: a NaN left in one would spread."""
        if blocks and not self.fused:
            index = torch.tensor(blocks, device=self.model.device)
            for keys, values in self.pool.layers.values():
                keys.index_fill_(0, index, 0)
                values.index_fill_(0, index, 0)

    def _slot(self, n_rows: int, width: int) -> Recorded:
        if (n_rows, width) not in self._recorded:
            device = self.model.device
            tables = torch.zeros(n_rows, width, dtype=torch.long, device=device)
            numbers = torch.zeros(2, n_rows, dtype=torch.long, device=device)
            chosen = torch.zeros(2, n_rows, dtype=torch.float64, device=device)
            self._recorded[n_rows, width] = Recorded(tables, numbers, chosen)
        return self._recorded[n_rows, width]

    # --- recording ---------------------------------------------------------------------------------------------------

    def _replay(self, recorded: Recorded) -> None:
        """Run a step: the first time as it is, which compiles what is needed, then recorded, then replayed."""
        if recorded.graph is not None:
            return recorded.graph.replay()
        if recorded.logits is None:
            return self._step(recorded)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._step(recorded)
        self._memory = self._memory or graph.pool()
        recorded.graph = graph
        graph.replay()

    def _step(self, recorded: Recorded) -> None:
        """The operations of a step: the model's, the most likely tokens, and the numbers of the next step."""
        tokens, lengths = recorded.numbers
        state = GraphState(self.pool, self.n_layers, recorded.tables, lengths)
        recorded.logits = self.model.step(tokens, state)  # (B, V)
        choose_greedy(recorded.logits, recorded.numbers, recorded.chosen)
