"""The engine: continuous batching of requests through a model's `start` and `step`, for every family.

Each `step` decodes one token for every running sequence and prefills a bounded part of the waiting prompts, so requests
join and leave between steps (Yu et al. 2022, "Orca"; Agrawal et al. 2023, "SARATHI"). A sequence never depends on the
others in the batch.

    engine = Engine(model, tokenizer)
    results = engine.run(requests)                     # offline
    engine.add(request); events = engine.step()        # a server's loop
    for event in engine.stream(request): ...           # one request, token by token

A sequence that reaches the model's last position finishes with reason "length": `max_tokens` may exceed what fits, the
prompt may not. If a pass of the model raises, it is repeated in halves: the requests at fault end with the error, the
others go on. The engine is not thread-safe.

    B rows, T tokens of a prompt, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.halving import decode_in_halves, merge_passes
from heedful.generate.matcher import GrammarFailed, new_matcher
from heedful.generate.model_runner import Chunk, ModelRunner
from heedful.generate.pace import PrefillPace, cost_per_key
from heedful.generate.request import Request, Result, TokenScore
from heedful.generate.sampling import InvalidLogits, sample, score_chosen, token_scores
from heedful.generate.scheduler import Scheduler, bucket_by_length
from heedful.generate.sequence import Event, GeneratedSequence, SequenceGroup
from heedful.generate.turns import Owner
from heedful.kernels.cpu.library import prepare
from heedful.kernels.cuda import supports_graphs
from heedful.models.base import GenerativeModel
from heedful.nn.paged import PagedState
from heedful.nn.state import State, swap_remove
from heedful.openmp import warn_if_slowed

DEFAULT_POOL = 2**15  # tokens of a paged KV cache whose size is not given


class Engine:
    """Runs requests on one model; the tokenizer is needed for text and stop strings only.

    `max_rows` bounds how many sequences decode at once, `chunk` how many prompt tokens a step prefills, `step_time` how
    many seconds that may take (None: no bound; less beside rows that decode, see PrefillPace), `cache_tokens` how many
    tokens all rows together may come to keep in the KV cache (padding not counted). With state "paged" (the default
    where decode steps are CUDA graphs) the prompts of a decoder-only model share the blocks of a common prefix, and
    cache_tokens is the size of the pool, in blocks of `block`: unless given 32,768, or the context length if that is
    more; on a CPU it takes memory only as it fills. `short_share` is for servers: see Scheduler.
    """

    def __init__(
        self,
        model: GenerativeModel[Any],
        tokenizer: SupportsDecode | None = None,
        *,
        max_rows: int = 32,
        chunk: int = 512,
        step_time: float | None = None,
        state: Literal["contiguous", "paged"] | None = None,
        cache_tokens: int | None = None,
        block: int = 16,
        short_share: float = 0.0,
    ) -> None:
        state = state or ("paged" if supports_graphs(model) else "contiguous")
        if state not in ("contiguous", "paged"):
            raise ValueError(f"state {state!r} is neither contiguous nor paged")
        if state == "paged" and cache_tokens is None:
            longest = model.context_length or DEFAULT_POOL
            cache_tokens = min(max_rows * longest, max(longest, DEFAULT_POOL))
        if any(p.is_cpu for p in model.parameters()):
            prepare()  # compile the C kernels here rather than in the first step
        self.model, self.tokenizer = model, tokenizer
        self.runner = ModelRunner(model, cache_tokens if state == "paged" else None, block)
        pace = PrefillPace() if step_time is None else PrefillPace(cost_per_key(model), step_time)
        allocate = self.runner.allocate
        self.scheduler: Scheduler[SequenceGroup] = Scheduler(max_rows, chunk, cache_tokens, allocate, pace, short_share)
        self._groups: dict[int, SequenceGroup] = {}  # waiting or running, by their request's id
        self._ids = count()
        self._decoding: list[GeneratedSequence] = []  # one per row of the state
        self._state: State | None = None
        self._events: list[Event] = []
        self._deferred: list[Event] = []  # of other requests, while `run` or `stream` waited for its own

    # --- requests --------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """ValueError if the request could never run; thread-safe."""
        self.runner.check(request)
        if request.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer: give the engine one, or use stop_ids")
        if request.grammar is not None:
            new_matcher(self.tokenizer, request.grammar, request.stop_ids, at_start=not request.prompt)
        self.scheduler.check(request.best_of or request.n, self.runner.cache_tokens(request))

    def add(self, request: Request, owner: Owner | None = None) -> int:
        """Queue a request; returns the id that its events carry. Owners take turns in the queue."""
        self.check(request)
        group = self.runner.new_group(next(self._ids), request, self.tokenizer, owner)
        self.scheduler.add(group)
        self._groups[group.id] = group
        return group.id

    def cancel(self, id: int) -> bool:
        """Drop a request and free its rows at once; False if there is none of this id (any more)."""
        group = self._groups.get(id)
        if group is None:
            return False
        for sequence in group.sequences:
            sequence.finish_reason = sequence.finish_reason or "error"
        with torch.inference_mode():
            self._remove(group)
            self._drop_finished_rows()
        self._deferred = [event for event in self._deferred if event.id != id]
        return True

    def step(self) -> list[Event]:
        """One token for every running sequence, and a part of the waiting prompts."""
        deferred, self._deferred = self._deferred, []
        return deferred + self._step()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._groups or self._deferred)

    def run(self, requests: Iterable[Request]) -> list[Result]:
        """Run requests to their end; if one fails its error is raised and the rest is cancelled."""
        ids: list[int] = []
        results: dict[int, Result] = {}
        try:
            for request in requests:
                ids.append(self.add(request))
            for event in self._events_of(set(ids)):
                if event.error is not None:
                    raise event.error
                if event.result is not None:
                    results[event.id] = event.result
        finally:
            for id in ids:
                self.cancel(id)
        return [results[id] for id in ids]

    def stream(self, request: Request) -> Iterator[Event]:
        """One request's events as they come; closing the iterator early cancels it."""
        return self._stream(self.add(request))

    def _stream(self, id: int) -> Iterator[Event]:
        try:
            for event in self._events_of({id}):
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            self.cancel(id)

    def _events_of(self, ids: set[int]) -> Iterator[Event]:
        """Step until these requests have ended and yield their events; those of others are deferred to `step`."""
        while not ids.isdisjoint(self._groups):
            events = self._step()
            self._deferred += [event for event in events if event.id not in ids]
            yield from (event for event in events if event.id in ids)

    # --- one step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        self._events, pace = [], self.scheduler.pace
        self._preempt()
        if pace.step_time is None:
            self._decode()
            self._prefill(self.scheduler.schedule())
            return self._events
        decoding = self._state is not None
        budget = pace.budget(decoding=decoding)
        chunks = self.scheduler.schedule(budget) if budget else []
        cost = sum(pace.cost(group.n_prefilled, n) for group, n in chunks)
        beside = self.runner.combinable(chunks) if decoding and pace.may_combine() else []
        begin = perf_counter()
        prefilled = self._decode(beside)
        if decoding and not beside:
            pace.record_decode(perf_counter() - begin)
            begin = perf_counter()
        self._prefill([chunk for chunk in chunks if chunk not in prefilled])
        for group, _ in chunks:
            if group.last_logits is not None and not group.last_logits.is_cpu:
                group.last_logits[0].item()  # waits for the device
        pace.record(cost, perf_counter() - begin, decoding=decoding, combined=bool(beside))
        return self._events

    def _preempt(self) -> None:
        """Free the memory of requests for which there is none any more, and queue them to be continued."""
        for group in self.scheduler.preempt():
            for row in reversed(range(len(self._decoding))):
                if self._decoding[row].group is group:
                    self._drop_row(row)
            self._free_state(group)
            group.preempt()
        if not self._decoding:
            self._state = None

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Prefill n tokens of each prompt, in as few passes as possible."""
        if self.runner.shares_prefixes:
            for wave in self.runner.prefix_waves(chunks):
                self._prefill_chunks(wave)
            return
        whole = [group for group, n in chunks if self._is_whole(group, n)]
        for bucket in bucket_by_length(whole, lambda group: group.n_left):
            self._prefill_batch(bucket)
        for group, n in chunks:
            if group not in whole:
                self._prefill_chunks([(group, n)])

    def _decode(self, beside: Sequence[Chunk] = ()) -> Sequence[Chunk]:
        """One token for every row, and in the same pass chunks of prompts; none of these if that pass failed."""
        if self._state is None or (not beside and self._decode_on_device()):
            return ()
        sequences, before = self._decoding, self._state.lengths
        try:
            logits = self.runner.decode([s.tokens[-1] for s in sequences], self._state, beside)
            if logits.is_cpu:
                warn_if_slowed()
            passes = [(sequences, logits, self._state)]
        except Exception as error:
            self._state.truncate(before)  # a pass may fail after it was recorded in the state
            if beside:
                return self._decode()
            passes = decode_in_halves(self.runner, self._state, sequences, error, self._fail)
            self._state = merge_passes(self._state, passes)
            self._decoding = [sequence for some, _, _ in passes for sequence in some]
        for some, logits, state in passes:
            self._sample_running(some, logits, state.lengths)
        self._drop_finished_rows()
        self._finish_prefill([group for group, _ in beside if group.state is not None and not group.n_left])
        return beside

    def _decode_on_device(self) -> bool:
        """One token for every row, sampled on the GPU, but for rows that have just come; False where that cannot be."""
        sequences, state = self._decoding, self._state
        assert state is not None
        chosen = self.runner.decode_and_sample(sequences, state)
        if chosen is None:
            return False
        for row, top in zip(chosen.rows, chosen.highest, strict=True):
            if not math.isfinite(top):
                self._fail(sequences[row].group, InvalidLogits([row], [top]))
        scores = score_chosen(chosen, [sequences[row].n_top_logprobs for row in chosen.rows])
        new = []
        for row, token, score in zip(chosen.rows, chosen.tokens, scores, strict=True):
            if sequences[row].finish_reason is None:
                sequences[row].sampler.record(token)
                new.append((sequences[row], token, score, state.lengths[row]))
        self._emit(self._append(new))
        self._drop_finished_rows()
        return True

    def _sample_running(self, sequences: Sequence[GeneratedSequence], logits: Tensor, lengths: Sequence[int]) -> None:
        """Sample the next token of those whose request has not failed meanwhile; rows with invalid logits fail."""
        sequences, logits, lengths = _unfinished(sequences, logits, lengths)
        try:
            try:
                events = self._sample(sequences, logits, lengths)
            except (InvalidLogits, GrammarFailed) as error:
                for row in error.rows:
                    self._fail(sequences[row].group, error)
                events = self._sample(*_unfinished(sequences, logits, lengths))
            self._emit(events)
        except Exception as error:
            for group in {s.group.id: s.group for s in sequences if s.finish_reason is None}.values():
                self._fail(group, error)

    def _sample(self, sequences: Sequence[GeneratedSequence], logits: Tensor, lengths: Sequence[int]) -> list[Event]:
        """Sample a token for each row of logits (B, V) and append it to its sequence."""
        tokens = sample(logits, [s.sampler for s in sequences])
        scores = token_scores(logits, tokens, [s.n_top_logprobs for s in sequences])
        return self._append(zip(sequences, tokens, scores, lengths, strict=True))

    def _append(self, rows: Iterable[tuple[GeneratedSequence, int, TokenScore | None, int]]) -> list[Event]:
        """Append to each sequence its token; the last number is how many are cached."""
        most = self.model.context_length
        return [s.append(token, score, full=most is not None and n >= most) for s, token, score, n in rows]

    # --- prefill ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_whole(group: SequenceGroup, n: int) -> bool:
        """Whether a prompt is prefilled at once, and can be in a batch with others."""
        return group.n_prefilled == 0 and n == group.n_left and not group.request.echo

    def _prefill_batch(self, groups: list[SequenceGroup]) -> None:
        """Prefill whole prompts as one batch; if that raises each alone, so that only the one at fault fails."""
        try:
            self._start_decoding(groups, *self.runner.prefill_batch(groups))
        except Exception as error:
            if len(groups) == 1:
                return self._fail(groups[0], error)
            for group in groups:
                group.reset()
                self._prefill_batch([group])

    def _prefill_chunks(self, chunks: list[Chunk]) -> None:
        """Prefill the next n tokens of each prompt; if that raises each alone, so that only the one at fault fails."""
        try:
            self.runner.prefill_chunks(chunks)
            self._finish_prefill([group for group, _ in chunks if group.n_left == 0])
        except Exception as error:
            if len(chunks) == 1:
                return self._fail(chunks[0][0], error)
            for group, n in chunks:
                if group.n_left == 0:
                    n = len(group.prompt)
                    self._free_state(group)
                    group.reset()
                self._prefill_chunks([(group, n)])

    def _finish_prefill(self, groups: list[SequenceGroup]) -> None:
        if groups:
            state = self.runner.take_state(groups)
            logits = torch.stack([group.last_logits for group in groups if group.last_logits is not None])
            self._start_decoding(groups, logits, state)

    def _start_decoding(self, groups: Sequence[SequenceGroup], logits: Tensor, state: State) -> None:
        """Sample the first tokens of prefilled prompts by the logits (B, V) after each; their rows join the batch."""
        events = [sequence.echo(self._text(g)) for g in groups if g.request.echo for sequence in g.sequences]
        rows = [row for row, group in enumerate(groups) if group.request.max_tokens for _ in group.sequences]
        sequences = [sequence for group in groups if group.request.max_tokens for sequence in group.sequences]
        try:
            events += self._sample(sequences, logits[rows], [state.lengths[row] for row in rows])
            going = [i for i, sequence in enumerate(sequences) if sequence.finish_reason is None]
            if going:
                self._add_prefilled(state, [rows[i] for i in going])
                self._decoding = self._decoding + [sequences[i] for i in going]
        finally:
            if state is not self._state:
                state.select([])  # frees its blocks in a pool
        self._emit(events)

    def _add_prefilled(self, state: State, rows: list[int]) -> None:
        if self._state is not None:
            self._state.append_rows(state, rows)
            return
        if rows != list(range(state.n_rows)):
            state.select(rows)
        self._state = state

    # --- finish ----------------------------------------------------------------------------------------------------

    def _emit(self, events: Sequence[Event]) -> None:
        """Add the events of this step; the last event of a finished request gets its result."""
        self._events += events
        for event in {event.id: event for event in events}.values():
            group = self._groups[event.id]
            if group.finished:
                event.result = group.result()
                self._remove(group)

    def _fail(self, group: SequenceGroup, error: Exception) -> None:
        """End a request with an error; sequences that finished before keep their reason."""
        for sequence in group.sequences:
            sequence.finish_reason = sequence.finish_reason or "error"
        ended = [s.index for s in group.sequences if s.finish_reason == "error"] or [0]
        self._events += [Event(group.id, index, None, "", finish_reason="error") for index in ended]
        self._events[-1].error = error
        self._remove(group)

    def _remove(self, group: SequenceGroup) -> None:
        self.scheduler.remove(group)
        del self._groups[group.id]
        self._free_state(group)

    @staticmethod
    def _free_state(group: SequenceGroup) -> None:
        if group.state is not None:
            group.state.select([])
            group.state = None

    def _drop_finished_rows(self) -> None:
        """Drop the rows of finished sequences from the batch."""
        for row in reversed(range(len(self._decoding))):
            sequence = self._decoding[row]
            if sequence.finish_reason is not None:
                if sequence.finish_reason == "error":
                    assert self._state is not None
                    self._state.free(row)  # nothing of it may be left to the next request
                self._drop_row(row)
        if not self._decoding:
            self._state = None

    def _drop_row(self, row: int) -> None:
        """Remove a row from the batch; what was computed stays in the prefix cache."""
        sequence = self._decoding[row]
        assert self._state is not None
        if isinstance(self._state, PagedState):
            self._state.cache_prefix(row, sequence.group.cached_tokens(sequence))
        self._state.remove_row(row)
        self._decoding = swap_remove(self._decoding, row)

    def _text(self, group: SequenceGroup) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(group.request.prompt)


def _unfinished(
    sequences: Sequence[GeneratedSequence], logits: Tensor, lengths: Sequence[int]
) -> tuple[Sequence[GeneratedSequence], Tensor, Sequence[int]]:
    """The rows of sequences that have no finish reason yet."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.finish_reason is None]
    if len(rows) == len(sequences):
        return sequences, logits, lengths
    return [sequences[r] for r in rows], logits[rows], [lengths[r] for r in rows]
