"""How the engine calls a model: prompts side by side, or one in parts, into contiguous states or into a pool's blocks.

B rows, T tokens of a prompt, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from heedful.generate.request import Request
from heedful.generate.scheduler import bucket_by_length
from heedful.generate.sequence import SequenceGroup
from heedful.models.base import Batch, DecoderModel
from heedful.models.vocabulary import check_token_ids, vocab_sizes
from heedful.nn.paged import PagedState, Pool
from heedful.nn.state import KeyValueState, State

AHEAD = 256  # positions allocated for new tokens when a prompt is read; more are added when these are full


class Speaker(Protocol):
    """What decoding needs of a model."""

    @property
    def longest(self) -> int | None: ...
    def start(self, batch: Batch, *, capacity: int = 0) -> tuple[Tensor, State]: ...
    def step(self, tokens: Tensor, state: Any, *, last: bool = False) -> Tensor: ...  # the state `start` gave


class ModelRunner:
    """A model and where its states live; with `pool_tokens` in a pool of that size."""

    def __init__(self, model: Speaker, pool_tokens: int | None = None, block: int = 16) -> None:
        self.model = model
        self.continues = isinstance(model, DecoderModel)
        self.n_read = 0  # tokens of prompts that went through the model
        self.pool: Pool | None = None
        if pool_tokens is not None:
            if not isinstance(model, DecoderModel) or type(model.new_state(0, 0)) is not KeyValueState:
                raise ValueError(f"a {type(model).__name__} cannot be paged: use state='contiguous'")
            self.pool = Pool(pool_tokens // block, block)

    def check(self, request: Request) -> None:
        """ValueError if the model cannot read it."""
        longest, (n_inputs, n_outputs) = self.model.longest, vocab_sizes(self.model)
        if self.continues and request.source is not None:
            raise ValueError("this model continues a prompt and has no encoder: it takes no source")
        if self.continues and not request.prompt:
            raise ValueError("the prompt is empty: begin with a token, for example the one that begins a text")
        if not self.continues and not request.source:
            raise ValueError("this model answers a source, and the request has none")
        for name, ids, size in ("prompt", request.prompt, n_outputs), ("source", request.source or (), n_inputs):
            if longest is not None and len(ids) > longest:
                raise ValueError(f"the {name} has {len(ids)} tokens, and this model has positions for {longest}")
            check_token_ids(ids, size, f"the {name}")

    def measure(self, request: Request) -> tuple[tuple[int, ...], int]:
        """What the decoder reads first, and how many tokens all answers may come to remember."""
        prompt = request.prompt or (getattr(self.model, "start_id", 0),)
        n = len(prompt) + request.max_tokens
        n = n if self.model.longest is None else min(n, self.model.longest)
        if self.pool is not None:
            n = -(-n // self.pool.block) * self.pool.block
        return prompt, n * (request.best_of or request.n)

    def step(self, tokens: Sequence[int], state: State) -> Tensor:
        """One more token for each row: logits (B, V)."""
        return self.model.step(self._tensor(tokens), state)

    def whole(self, tasks: Sequence[SequenceGroup]) -> tuple[Tensor, State]:
        """Read whole prompts side by side: logits (B, V) after each."""
        prompts = [task.prompt for task in tasks]
        logits, state = self.model.start(self.batch(tasks, prompts), capacity=self._capacity(tasks))
        for task in tasks:
            task.n_read = len(task.prompt)
            self.n_read += task.n_read
        return logits, state

    def begin(self, task: SequenceGroup) -> None:
        """A prompt will be read: with a pool, what is known of it need not be."""
        if self.pool is not None:
            assert isinstance(self.model, DecoderModel)
            task.state = PagedState(self.pool, len(self.model.decoder.blocks), 1)
            self._adopt(task)

    def waves(self, plan: Sequence[tuple[SequenceGroup, int]]) -> Iterator[list[tuple[SequenceGroup, int]]]:
        """Prompts, each with how many tokens of it to read, in groups to read side by side, one group after the other:
        those that go on alike wait for the first of them, and then know what it has read."""
        left = list(plan)
        while left:
            now: list[tuple[SequenceGroup, int]] = []
            later: list[tuple[SequenceGroup, int]] = []
            seen: set[tuple[int, ...]] = set()
            for task, n in left:
                self._adopt(task)
                following = self._following(task)
                (later if following in seen else now).append((task, n))
                if following is not None:
                    seen.add(following)
            yield from bucket_by_length([piece for piece in now if not piece[0].request.echo], self._size)
            yield from ([piece] for piece in now if piece[0].request.echo)
            left = later

    def _adopt(self, task: SequenceGroup) -> None:
        if not task.request.echo:  # the prompt's own scores take reading
            assert isinstance(task.state, PagedState)
            task.n_read = task.state.adopt(0, task.prompt)

    def _following(self, task: SequenceGroup) -> tuple[int, ...] | None:
        """The tokens up to the end of the block that is read next, where another prompt may have the same."""
        assert self.pool is not None
        end = (task.n_read // self.pool.block + 1) * self.pool.block
        return task.prompt[:end] if end < len(task.prompt) and not task.request.echo else None

    @staticmethod
    def _size(piece: tuple[SequenceGroup, int]) -> int:
        task, n = piece
        return min(n, len(task.prompt) - task.n_read)

    def pieces(self, pieces: Sequence[tuple[SequenceGroup, int]]) -> None:
        """Read n more tokens of each prompt, side by side if they are several; note the logits after each."""
        if len(pieces) == 1:
            return self.part(*pieces[0])
        assert isinstance(self.model, DecoderModel)
        tasks = [task for task, _ in pieces]
        states = [task.state for task in tasks if isinstance(task.state, PagedState)]
        whole = PagedState.beside(states)
        prompts = [task.prompt[task.n_read : task.n_read + n] for task, n in pieces]
        logits, _ = self.model.start(self.batch(tasks, prompts), state=whole)
        whole.apart(states)
        for task, prompt, row in zip(tasks, prompts, logits, strict=True):
            self._note(task, row[None], len(prompt))

    def taken(self, tasks: Sequence[SequenceGroup]) -> State:
        """What is remembered of prompts that were read, as one state that is no longer theirs."""
        states = [task.state for task in tasks]
        for task in tasks:
            task.state = None
        if len(states) > 1:
            return PagedState.beside([state for state in states if isinstance(state, PagedState)])
        assert states[0] is not None
        return states[0]

    def part(self, task: SequenceGroup, n: int) -> None:
        """Read n more tokens of one prompt; note its scores if it is echoed."""
        echo = task.request.echo
        if task.state is None and self.pool is not None:
            self.begin(task)
        elif task.state is None:
            first = task.prompt[: 1 if echo else n]  # `start` gives the last logits alone, an echo wants all
            logits, task.state = self.model.start(self.batch([task], [first]), capacity=self._capacity([task]))
            self._note(task, logits, len(first))
            n -= len(first)
        tokens = task.prompt[task.n_read : task.n_read + n]
        if tokens:
            logits = self.model.step(self._tensor([tokens]), task.state, last=not echo)
            self._note(task, logits[0] if echo else logits, len(tokens))

    def _note(self, task: SequenceGroup, logits: Tensor, n: int) -> None:
        """n tokens were read; logits (n, V) after each of them, or (1, V) after the last."""
        if task.request.echo:
            task.score_prompt(logits)
        task.last = logits[-1]
        task.n_read += n
        self.n_read += n
        if isinstance(task.state, PagedState):
            task.state.publish(0, task.prompt)

    def _tensor(self, ids: Sequence[Any]) -> Tensor:
        return torch.tensor(ids, device=getattr(self.model, "device", None))

    def batch(self, tasks: Sequence[SequenceGroup], prompts: Sequence[Sequence[int]]) -> Batch:
        tokens, lengths = self._padded(prompts)
        if self.continues:
            return Batch(tokens, lengths)
        return Batch(tokens, lengths, *self._padded([task.request.source or () for task in tasks]))

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        longest = max(map(len, rows))
        tokens = self._tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        uneven = any(len(row) < longest for row in rows)
        return tokens, self._tensor([len(row) for row in rows]) if uneven else None

    def _capacity(self, tasks: Sequence[SequenceGroup]) -> int:
        need = max(len(task.prompt) + min(task.request.max_tokens, AHEAD) for task in tasks)
        return need if self.model.longest is None else min(need, self.model.longest)
