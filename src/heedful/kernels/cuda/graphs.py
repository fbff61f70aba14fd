"""Decode steps as CUDA graphs: the launches of a whole step are recorded once and replayed as one.

A step of a small model is hundreds of launches of a few microseconds each, and Python takes longer to issue one than
the GPU to run it. `DecodeGraphs` records `model.step` on a `GraphState` for a number of rows, with the choice of the
next tokens as its last operations, so that the next step can follow without the host: the host reads the tokens of a
step while the GPU computes the one after it. If the batch changed meanwhile (a row ended, another came), what was
computed for rows that are still there counts, and the next step is launched for all. An encoder-decoder's step also
reads the sources' keys and values, in a `GraphMemory`.

    B rows, W blocks in a table, M positions of the sources, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heedful.kernels.cuda.decode import CudaStack, n_logits
from heedful.kernels.cuda.device_sampling import RowSampling, SamplingKind, SupportsSampling
from heedful.kernels.cuda.sampling import choose_tokens
from heedful.kernels.cuda.state import GraphMemory, GraphState
from heedful.models.base import DecoderModel, EncoderDecoderModel
from heedful.nn.paged import BlockPool, PagedState

NARROW = 16  # blocks in the smallest table; a stack without kernels attends to all positions of its table
SHORT = 32  # positions of the shortest memory
MOST = 256  # graphs that are kept, so that no mix of requests makes more and more of them


@dataclass(eq=False)
class Recorded:
    """A step for a number of rows: its inputs and outputs on the device, and its graphs."""

    tables: Tensor  # (B, W)
    numbers: Tensor  # (2, B) tokens and lengths; replaced by the next ones at the end of a step
    chosen: Tensor  # (2 + 1 + 2 n_top, B) in float64: the tokens, the rows' highest logits, and scores if there are any
    rows: RowSampling
    memory: GraphMemory | None = None  # of an encoder-decoder
    logits: Tensor | None = None  # (B, V)
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class Launched:
    """A step under way: whose rows it is for, and where its tokens will be."""

    recorded: Recorded
    tables: list[list[int]]  # the rows' block tables, the same objects as the state's
    lengths: list[int]
    samplers: Sequence[SupportsSampling]
    done: torch.cuda.Event
    chosen: Tensor  # on the host
    tokens: list[int] = field(default_factory=list)  # the inputs, where they are known


@dataclass
class ChosenTokens:
    """The tokens of a step on the host, of the rows that it was for."""

    rows: list[int]
    tokens: list[int]
    highest: list[float]  # the highest logit of each row; without a finite one its token means nothing
    logprobs: list[float]  # of the tokens; empty if no scores were wanted
    top: list[list[tuple[int, float]]]  # the most likely tokens of each row and their log-probabilities


class DecodeGraphs:
    """The graphs of a model for the rows of a pool's states."""

    def __init__(self, model: DecoderModel | EncoderDecoderModel, pool: BlockPool) -> None:
        self.model, self.pool = model, pool
        self.n_layers, self.n_tokens = len(model.decoder.blocks), n_logits(model.head)
        self.unused = pool.allocate()  # where rows that are not in use write to
        self.fused = isinstance(model.decoder, CudaStack)
        longest = min(model.context_length or 2**30, pool.n_blocks * pool.block_size)
        self.widest = -(-longest // pool.block_size)
        self._recorded: dict[tuple[int, int, int, SamplingKind], Recorded] = {}  # by rows, W, M (0: none) and kind
        self._memories: dict[tuple[int, int], GraphMemory] = {}  # by rows and M
        self._graph_pool: Any = None  # memory that all graphs share: one runs at a time
        self._launched: Launched | None = None

    # --- a step ------------------------------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int], state: PagedState) -> Tensor:
        """Logits (B, V) after one more token of each row; to be read before the next step."""
        self._launched = None
        recorded = self._prepare(tokens, state, 1, ())
        self._replay(recorded)
        state.advance(1)
        assert recorded.logits is not None
        return recorded.logits[: len(tokens)]

    def choose(
        self, tokens: Sequence[int], state: PagedState, samplers: Sequence[SupportsSampling], *, scores: bool = False
    ) -> ChosenTokens:
        """The next token of each row after one more token, by its sampler, and with `scores` its log-probabilities; the
        step after it is launched too. Rows that came after this step was launched get theirs in the next."""
        now = self._launched
        places = None if now is None else self._places(now, tokens, state, scores)
        if now is None or places is None:
            recorded = self._prepare(tokens, state, 2, samplers, scores)
            now = self._launch(recorded, state.tables, state.lengths, samplers, 0)
            places = list(range(len(tokens)))
        same = places == list(range(len(now.tables)))
        self._launched = self._follow(now) if same else None
        now.done.synchronize()
        chosen = self._read(now, places)
        state.advance([0 if place is None else 1 for place in places])
        for row in chosen.rows:
            if samplers[row].params.temperature > 0:
                samplers[row].uniforms(now.recorded.rows.uniforms.shape[1])  # which this step has used
        if self._launched is not None:
            self._launched.tokens = chosen.tokens
        elif not same:
            self._launch_changed(tokens, chosen, state, samplers, scores)
        return chosen

    @staticmethod
    def _read(step: Launched, places: Sequence[int | None]) -> ChosenTokens:
        """What a finished step chose for the rows that have a place in it."""
        rows = [row for row, place in enumerate(places) if place is not None]
        ids, highest, *scores = step.chosen[:, [places[row] for row in rows]].tolist()
        tokens = [int(token) if math.isfinite(top) else 0 for token, top in zip(ids, highest, strict=True)]
        own, rest = (scores[0], scores[1:]) if scores else ([], [])
        n = len(rest) // 2
        values, at = list(zip(*rest[:n], strict=True)), list(zip(*rest[n:], strict=True))
        top = [[(int(i), value) for i, value in zip(*row, strict=True)] for row in zip(at, values, strict=True)]
        return ChosenTokens(rows, tokens, highest, own, top)

    @staticmethod
    def _places(launched: Launched, tokens: Sequence[int], state: PagedState, scores: bool) -> list[int | None] | None:
        """Which row of a launched step each row is; None if it is for too few of them, or for other tokens."""
        if launched.recorded.rows.kind.scores != scores or len(launched.tokens) != len(launched.tables):
            return None
        known = {id(table): place for place, table in enumerate(launched.tables)}
        places = [known.get(id(table)) for table in state.tables]
        found = [(row, place) for row, place in enumerate(places) if place is not None]
        right = all(
            (launched.lengths[place], launched.tokens[place]) == (state.lengths[row], tokens[row])
            for row, place in found
        )
        return places if right and 2 * len(found) >= len(tokens) else None

    def _launch_changed(
        self,
        tokens: Sequence[int],
        chosen: ChosenTokens,
        state: PagedState,
        samplers: Sequence[SupportsSampling],
        scores: bool,
    ) -> None:
        """Launch the next step of a batch whose rows have changed, if there is a position for its tokens in every row.
        Tokens that penalties count are counted by the host first, after this."""
        if not self._has_room(max(state.lengths)) or self.pool.n_free < len(tokens):
            return
        if SamplingKind.of(samplers, scores).penalties:
            return
        following = list(tokens)
        for row, token in zip(chosen.rows, chosen.tokens, strict=True):
            following[row] = token
        recorded = self._prepare(following, state, 1, samplers, scores)
        self._launched = self._launch(recorded, state.tables, state.lengths, samplers, 0)
        self._launched.tokens = following

    def _has_room(self, length: int) -> bool:
        """Whether a row of this length can have another token."""
        return length < min(self.widest * self.pool.block_size, self.model.context_length or 2**30)

    def _follow(self, step: Launched) -> Launched | None:
        """Launch the step after this one, if there is a position for its tokens in every row."""
        lengths = [n + 1 for n in step.lengths]
        size, changed = self.pool.block_size, []
        if not self._has_room(max(lengths)):
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
        return self._launch(step.recorded, step.tables, lengths, step.samplers, 1)

    def _launch(
        self,
        recorded: Recorded,
        tables: list[list[int]],
        lengths: list[int],
        samplers: Sequence[SupportsSampling],
        ahead: int,
    ) -> Launched:
        recorded.rows.load_uniforms(samplers, ahead)
        self._replay(recorded)
        return Launched(recorded, list(tables), list(lengths), samplers, *self._copy_to_host(recorded.chosen))

    @staticmethod
    def _copy_to_host(chosen: Tensor) -> tuple[torch.cuda.Event, Tensor]:
        """A copy that will be there when the event has come."""
        host = torch.empty(chosen.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done, host

    # --- inputs ------------------------------------------------------------------------------------------------------

    def _prepare(
        self,
        tokens: Sequence[int],
        state: PagedState,
        ahead: int,
        samplers: Sequence[SupportsSampling],
        scores: bool = False,
    ) -> Recorded:
        """Allocate blocks for the next tokens, and put tokens, lengths, block tables and parameters on the device."""
        n_rows, longest = len(tokens), self.widest * self.pool.block_size
        n_new = [min(ahead, longest - length) for length in state.lengths]
        fresh = state.prepare(n_new if self.pool.n_free >= 2 * n_rows else [1] * n_rows)
        self._clear(fresh)
        wide = max(map(len, state.tables))
        width = self.widest if self.fused else min(self.widest, max(NARROW, _power_of_2(wide)))
        recorded = self._slot(_power_of_2(n_rows), width, self._memory(state), SamplingKind.of(samplers, scores))
        n_slots = len(recorded.tables)
        spare = n_slots - n_rows
        rows = [table + [self.unused] * (width - len(table)) for table in state.tables] + [
            [self.unused] * width
        ] * spare
        recorded.tables.copy_(torch.tensor(rows), non_blocking=True)
        recorded.numbers.copy_(torch.tensor([[*tokens, *[0] * spare], [*state.lengths, *[0] * spare]]))
        recorded.rows.load(samplers)
        return recorded

    def _clear(self, blocks: list[int]) -> None:
        """Zero new blocks where masked positions are multiplied too: a NaN left in one would spread."""
        if blocks and not self.fused:
            index = torch.tensor(blocks, device=self.model.device)
            for keys, values in self.pool.layers.values():
                keys.index_fill_(0, index, 0)
                values.index_fill_(0, index, 0)

    def _memory(self, state: PagedState) -> GraphMemory | None:
        """The sources' keys and values where a graph reads them; None in a decoder."""
        if not state.cross:
            return None
        size = _power_of_2(state.n_rows), max(SHORT, _power_of_2(state.cross[0].keys.shape[2]))
        if size not in self._memories:
            self._memories[size] = GraphMemory(state, *size)
        self._memories[size].load(state)
        return self._memories[size]

    def _slot(self, n_rows: int, width: int, memory: GraphMemory | None, kind: SamplingKind) -> Recorded:
        key = n_rows, width, 0 if memory is None else memory.n_positions, kind
        if key not in self._recorded:
            if len(self._recorded) == MOST:
                del self._recorded[next(iter(self._recorded))]  # the oldest
            device = self.model.device
            tables = torch.zeros(n_rows, width, dtype=torch.long, device=device)
            numbers = torch.zeros(2, n_rows, dtype=torch.long, device=device)
            rows = RowSampling(kind, n_rows, self.n_tokens, device)
            n_scores = 1 + 2 * rows.n_top if kind.scores else 0
            chosen = torch.zeros(2 + n_scores, n_rows, dtype=torch.float64, device=device)
            self._recorded[key] = Recorded(tables, numbers, chosen, rows, memory)
        return self._recorded[key]

    # --- recording ---------------------------------------------------------------------------------------------------

    def _replay(self, recorded: Recorded) -> None:
        """Run a step: the first time as it is, which compiles what is needed, then recorded, then replayed."""
        if recorded.graph is not None:
            return recorded.graph.replay()
        if recorded.logits is None:
            return self._step(recorded)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            self._step(recorded)
        self._graph_pool = self._graph_pool or graph.pool()
        recorded.graph = graph
        graph.replay()

    def _step(self, recorded: Recorded) -> None:
        """The operations of a step: the model's, the choice of tokens, and the numbers of the next step."""
        tokens, lengths = recorded.numbers
        state = GraphState(self.pool, self.n_layers, recorded.tables, lengths, recorded.memory)
        recorded.logits = self.model.step(tokens, state)  # (B, V)
        assert recorded.logits.shape[1] == self.n_tokens
        choose_tokens(recorded.logits, recorded.numbers, recorded.chosen, recorded.rows)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()
