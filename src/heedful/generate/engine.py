"""The engine: many requests at once through `start` and `step`, whatever the family; offline and behind a server.

Each `step` gives every running answer one token, and reads a bounded part of the prompts that wait: requests join
and leave between steps (continuous batching; Yu et al. 2022, "Orca"). An answer never depends on what else is there.

    engine = Engine(model, tokenizer)
    results = engine.run(requests)                     # offline
    engine.add(request); events = engine.step()        # a server's loop
    for event in engine.stream(request): ...           # one request, as it is written

An answer that reaches the model's last position ends there with finish_reason "length": `max_tokens` may be more than
fits, the prompt may not. Where a pass of the model fails it is tried again in parts: those at fault end with the error,
and the others go on. The engine belongs to one thread.

    B rows, T tokens of a prompt, V vocabulary
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count, zip_longest
from typing import Literal

import torch
from torch import Tensor

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.model_runner import ModelRunner
from heedful.generate.model_runner import Speaker as Speaker
from heedful.generate.request import Request, Result, Sampling
from heedful.generate.sampling import InvalidLogits, sample, token_scores
from heedful.generate.scheduler import Scheduler, bucket_by_length
from heedful.generate.sequence import Event, GeneratedSequence, SequenceGroup
from heedful.models.base import Batch, row_lengths
from heedful.nn.paged import PagedState
from heedful.nn.state import State, without

POOL = 2**15  # tokens in a pool of which nobody has said how large it should be
# The rows of one decode pass: their sequences, logits (B, V) and KV cache.
Pass = tuple[list[GeneratedSequence], Tensor, State]


class Engine:
    """Answers requests with one model; its tokenizer is needed for text and stop texts only.

    `max_rows` bounds how many answers are written at once, `chunk` how many tokens of prompts a step reads,
    `cache_tokens` how many tokens all rows together may come to remember (what pads them to one length not counted).
    With state "paged" (decoder-only models) prompts that begin alike are read once, and cache_tokens is the size of the
    pool, in blocks of `block`, at most 32,768 unless told; on a CPU it takes memory only as it fills.
    """

    def __init__(
        self,
        model: Speaker,
        tokenizer: SupportsDecode | None = None,
        *,
        max_rows: int = 32,
        chunk: int = 512,
        state: Literal["contiguous", "paged"] = "contiguous",
        cache_tokens: int | None = None,
        block: int = 16,
    ) -> None:
        if state not in ("contiguous", "paged"):
            raise ValueError(f"state {state!r} is neither contiguous nor paged")
        if state == "paged" and cache_tokens is None:
            cache_tokens = min(max_rows * (model.longest or POOL), POOL)
        self.model, self.tokenizer = model, tokenizer
        self.reader = ModelRunner(model, cache_tokens if state == "paged" else None, block)
        self.scheduler: Scheduler[SequenceGroup] = Scheduler(max_rows, chunk, cache_tokens, self.reader.begin)
        self._tasks: dict[int, SequenceGroup] = {}
        self._ids = count()
        self._running: list[GeneratedSequence] = []  # one per row of the state
        self._state: State | None = None
        self._events: list[Event] = []
        self._kept: list[Event] = []  # of others, while `run` or `stream` waited for its own

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Put a request in line; its number is in all its events."""
        self.reader.check(request)
        task = SequenceGroup(next(self._ids), request, *self.reader.measure(request), self.tokenizer)
        self.scheduler.add(task)
        self._tasks[task.id] = task
        return task.id

    def cancel(self, id: int) -> bool:
        """Forget a request, its rows free at once; False if there is none of this number (any more)."""
        task = self._tasks.get(id)
        if task is None:
            return False
        for answer in task.answers:
            answer.finish_reason = answer.finish_reason or "error"
        with torch.inference_mode():
            self._close(task)
            self._let_go()
        self._kept = [event for event in self._kept if event.id != id]
        return True

    def step(self) -> list[Event]:
        """A token for every running answer, and a part of the prompts that wait."""
        kept, self._kept = self._kept, []
        return kept + self._step()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._tasks or self._kept)

    def run(self, requests: Iterable[Request]) -> list[Result]:
        """Answer all of them; if one fails its error is raised and the rest is cancelled."""
        ids: list[int] = []
        results: dict[int, Result] = {}
        try:
            for request in requests:
                ids.append(self.add(request))
            for event in self._follow(set(ids)):
                if event.error is not None:
                    raise event.error
                if event.result is not None:
                    results[event.id] = event.result
        finally:
            for id in ids:
                self.cancel(id)
        return [results[id] for id in ids]

    def stream(self, request: Request) -> Iterator[Event]:
        """One request's events as they come; a stream that is closed early cancels it."""
        return self._stream(self.add(request))

    def _stream(self, id: int) -> Iterator[Event]:
        try:
            for event in self._follow({id}):
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            self.cancel(id)

    def _follow(self, ids: set[int]) -> Iterator[Event]:
        """The events of these requests until all have ended; those of others are kept for `step`."""
        while not ids.isdisjoint(self._tasks):
            events = self._step()
            self._kept += [event for event in events if event.id not in ids]
            yield from (event for event in events if event.id in ids)

    # --- a step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        self._events = []
        self._speak()
        plan = self.scheduler.plan()
        if self.reader.pool is not None:
            for pieces in self.reader.waves(plan):
                self._read_pieces(pieces)
            return self._events
        together = [task for task, n in plan if self._at_once(task, n)]
        for group in bucket_by_length(together, lambda task: task.n_left):
            self._read_together(group)
        for task, n in plan:
            if task not in together:
                self._read_pieces([(task, n)])
        return self._events

    def _speak(self) -> None:
        """One more token for every row."""
        if self._state is None:
            return
        answers, before = self._running, self._state.lengths
        try:
            found = [(answers, self.reader.step([a.tokens[-1] for a in answers], self._state), self._state)]
        except Exception as problem:
            self._state.truncate(before)  # a pass may fail after it was noted
            found = self._speak_apart(self._state, list(range(len(answers))), problem)
            self._rejoin(found)
        for some, logits, state in found:
            self._say(some, logits, state.lengths)
        self._let_go()

    def _speak_apart(self, state: State, rows: list[int], problem: Exception) -> list[Pass]:
        """A pass of these rows failed: try each half of them. The one that fails alone ends with its problem."""
        if len(rows) == 1:
            self._fail(self._running[rows[0]].task, problem)
            return []
        found: list[Pass] = []
        for half in rows[: len(rows) // 2], rows[len(rows) // 2 :]:
            going = [row for row in half if self._running[row].finish_reason is None]  # a request may have several
            if not going:
                continue
            part, answers = state.part(going), [self._running[row] for row in going]
            try:
                found.append((answers, self.reader.step([a.tokens[-1] for a in answers], part), part))
            except Exception as another:
                found += self._speak_apart(state, going, another)
        return found

    def _rejoin(self, found: Sequence[Pass]) -> None:
        """Make one state of the parts; the rows that failed are in none of them."""
        assert self._state is not None
        whole = self._state.part([])
        for _, _, part in found:
            whole.join(part)
        self._state.select([])  # what a pool held of those that failed is free
        self._running = [answer for answers, _, _ in found for answer in answers]
        self._state = whole if self._running else None

    def _say(self, answers: Sequence[GeneratedSequence], logits: Tensor, lengths: Sequence[int]) -> None:
        """The next tokens of those whose request has not failed meanwhile."""
        rows = [row for row, answer in enumerate(answers) if answer.finish_reason is None]
        if len(rows) < len(answers):
            answers, logits, lengths = [answers[r] for r in rows], logits[rows], [lengths[r] for r in rows]
        try:
            self._emit(self._possible(answers, logits, lengths))
        except Exception as problem:
            for task in {a.task.id: a.task for a in answers if a.finish_reason is None}.values():
                self._fail(task, problem)

    def _possible(self, answers: Sequence[GeneratedSequence], logits: Tensor, lengths: Sequence[int]) -> list[Event]:
        """The next tokens; rows of which none is possible fail by themselves."""
        try:
            return self._next(answers, logits, lengths)
        except InvalidLogits as problem:
            for row in problem.rows:
                self._fail(answers[row].task, problem)
            rows = [row for row, answer in enumerate(answers) if answer.finish_reason is None]
            return self._next([answers[row] for row in rows], logits[rows], [lengths[row] for row in rows])

    def _next(self, answers: Sequence[GeneratedSequence], logits: Tensor, lengths: Sequence[int]) -> list[Event]:
        """Choose a token for each row of logits (B, V)."""
        tokens = sample(logits, [a.sampler for a in answers])
        found = token_scores(logits, tokens, [a.n_top for a in answers])
        longest = self.model.longest
        return [
            answer.take(token, score, full=longest is not None and length >= longest)
            for answer, token, score, length in zip(answers, tokens, found, lengths, strict=True)
        ]

    # --- prompts ---------------------------------------------------------------------------------------------------

    def _at_once(self, task: SequenceGroup, n: int) -> bool:
        """Whether a prompt is read as a whole, and with others."""
        return self.reader.pool is None and task.n_read == 0 and n == task.n_left and not task.request.echo

    def _read_together(self, tasks: list[SequenceGroup]) -> None:
        """Read whole prompts side by side; if that fails each alone, so that only the one at fault fails."""
        try:
            self._begin(tasks, *self.reader.whole(tasks))
        except Exception as problem:
            if len(tasks) == 1:
                return self._fail(tasks[0], problem)
            for task in tasks:
                task.reset()
                self._read_together([task])

    def _read_pieces(self, pieces: list[tuple[SequenceGroup, int]]) -> None:
        """Read the next n tokens of each prompt; if that fails each alone, so that only the one at fault fails."""
        try:
            self.reader.pieces(pieces)
            tasks = [task for task, _ in pieces if task.n_left == 0]
            if tasks:
                state = self.reader.taken(tasks)
                self._begin(tasks, torch.stack([task.last for task in tasks if task.last is not None]), state)
        except Exception as problem:
            if len(pieces) == 1:
                return self._fail(pieces[0][0], problem)
            for task, n in pieces:
                if task.n_left == 0:
                    n = len(task.prompt)
                    self._close_state(task)
                    task.reset()
                self._read_pieces([(task, n)])

    def _begin(self, tasks: Sequence[SequenceGroup], logits: Tensor, state: State) -> None:
        """Prompts are read: the first tokens by the logits (B, V) after each; those that go on join the others."""
        events = [answer.echo(self._text(task)) for task in tasks if task.request.echo for answer in task.answers]
        rows = [row for row, task in enumerate(tasks) if task.request.max_tokens for _ in task.answers]
        answers = [answer for task in tasks if task.request.max_tokens for answer in task.answers]
        try:
            events += self._next(answers, logits[rows], [state.lengths[row] for row in rows])
            going = [i for i, answer in enumerate(answers) if answer.finish_reason is None]
            if going:
                self._join(state, [rows[i] for i in going])
                self._running = self._running + [answers[i] for i in going]
        finally:
            if state is not self._state:
                state.select([])  # what a pool holds of it is free
        self._emit(events)

    def _join(self, state: State, rows: list[int]) -> None:
        if self._state is not None:
            self._state.join(state, rows)
            return
        if rows != list(range(state.n_rows)):
            state.select(rows)
        self._state = state

    # --- ends ------------------------------------------------------------------------------------------------------

    def _emit(self, events: Sequence[Event]) -> None:
        """Hand out what is settled; the last event of a request brings its result."""
        self._events += events
        for event in {event.id: event for event in events}.values():
            task = self._tasks[event.id]
            if task.done:
                event.result = task.result()
                self._close(task)

    def _fail(self, task: SequenceGroup, problem: Exception) -> None:
        """End a request; answers that ended before have said so."""
        for answer in task.answers:
            answer.finish_reason = answer.finish_reason or "error"
        ended = [a.index for a in task.answers if a.finish_reason == "error"] or [0]
        self._events += [Event(task.id, index, None, "", finish_reason="error") for index in ended]
        self._events[-1].error = problem
        self._close(task)

    def _close(self, task: SequenceGroup) -> None:
        self.scheduler.remove(task)
        del self._tasks[task.id]
        self._close_state(task)

    @staticmethod
    def _close_state(task: SequenceGroup) -> None:
        if task.state is not None:
            task.state.select([])
            task.state = None

    def _let_go(self) -> None:
        """Rows whose answers have ended make room."""
        for row in reversed(range(len(self._running))):
            answer = self._running[row]
            if answer.finish_reason is not None:
                assert self._state is not None
                if answer.finish_reason == "error":
                    self._state.free(row)  # nothing of it may be left to whoever comes next
                elif isinstance(self._state, PagedState):  # what was said may begin the next prompt
                    self._state.publish(row, [*answer.task.prompt, *answer.tokens])
                self._state.drop(row)
                self._running = without(self._running, row)
        if not self._running:
            self._state = None

    def _text(self, task: SequenceGroup) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(task.request.prompt)


def generate_batch(
    model: Speaker, batch: Batch, max_tokens: int, how: Sampling, stop: Collection[int] = ()
) -> list[list[int]]:
    """All new tokens of each row of a batch; the token it stopped at is not among them."""
    prompts, sources = _rows(batch.tokens, batch.lengths), _rows(batch.source, batch.source_lengths)
    requests = [
        Request(prompt or (), source, max_tokens, how, stop_ids=frozenset(stop))
        for prompt, source in zip_longest(prompts, sources)
    ]
    engine = Engine(model, max_rows=len(requests), chunk=sum(map(len, [*prompts, *sources])))
    return [result.choices[0].tokens for result in engine.run(requests)]


def request_batches(
    model: Speaker, tokenizer: SupportsDecode | None, requests: Sequence[Request], most: int
) -> list[tuple[list[SequenceGroup], Batch]]:
    """All requests, checked, in batches of at most so many: for what answers a batch from its beginning to its end
    (beam search, speculation). Requests of about one length go together; a task's number is its request's place.
    """
    reader = ModelRunner(model)
    for request in requests:
        reader.check(request)
    tasks = [SequenceGroup(i, request, *reader.measure(request), tokenizer) for i, request in enumerate(requests)]
    groups = bucket_by_length(tasks, lambda task: task.n_left)
    parts = [group[i : i + most] for group in groups for i in range(0, len(group), most)]
    return [(part, reader.batch(part, [task.prompt for task in part])) for part in parts]


def _rows(tokens: Tensor | None, lengths: Tensor | None) -> list[tuple[int, ...]]:
    """The rows of (B, T) without their padding; none of nothing."""
    if tokens is None:
        return []
    return [tuple(row[:n]) for row, n in zip(tokens.tolist(), row_lengths(tokens, lengths), strict=True)]


def greedy_batch(model: Speaker, batch: Batch, max_tokens: int) -> list[list[int]]:
    """The most likely token at each step, for every row."""
    return generate_batch(model, batch, max_tokens, Sampling(temperature=0))
