"""A request while it is being answered: what was read of its prompt, and what each of its answers says so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heedful.generate.detokenizer import StoppingDetokenizer, SupportsDecode
from heedful.generate.request import Choice, FinishReason, Request, Result, TokenScore
from heedful.generate.sampling import Sampler, token_scores
from heedful.nn.state import State


@dataclass
class Event:
    """Something was said, or an answer has ended. The last event of a request carries its result, or its error."""

    id: int  # of the request
    index: int  # of the answer
    token: int | None  # None for the echo of a prompt, a stop token, and an error
    piece: str  # text that is certain now; may be empty
    score: TokenScore | None = None  # where scores were asked for; of a stop token too
    finish_reason: FinishReason | None = None
    result: Result | None = None
    error: Exception | None = None
    prompt_scores: list[TokenScore | None] | None = None  # with the echo of a prompt


class GeneratedSequence:
    """One answer while it is written."""

    def __init__(self, task: SequenceGroup, index: int, tokenizer: SupportsDecode | None) -> None:
        request = task.request
        self.task, self.index = task, index
        self.sampler = Sampler(request.sampling, request.prompt, request.first + index)
        self.writer = StoppingDetokenizer(tokenizer, request.stop, request.prompt)
        self.tokens: list[int] = []
        self.text = ""
        self.scores: list[TokenScore] = []  # of all that was drawn, a stop token too
        self.finish_reason: FinishReason | None = None

    @property
    def n_top(self) -> int | None:
        """How many alternatives to score beside the token; None if nobody asks for scores."""
        request = self.task.request
        ranked = request.best_of is not None and request.best_of > request.n
        return 0 if request.logprobs is None and ranked else request.logprobs

    def echo(self, text: str) -> Event:
        """The prompt's text, before anything is said."""
        if not self.task.request.max_tokens:
            self.finish_reason = "length"
        event = self._event(None, text, None)
        event.prompt_scores = self.task.echoed
        return event

    def take(self, token: int, score: TokenScore | None, *, full: bool) -> Event:
        """The next token; `full` says that the model has no position to read it at."""
        if score is not None:
            self.scores.append(score)
        if token in self.task.request.stop_ids:
            self.finish_reason = "stop"
            return self._event(None, self.writer.flush(), score)
        self.tokens.append(token)
        piece = self.writer.push(token)
        if not self.writer.stopped and (full or len(self.tokens) >= self.task.request.max_tokens):
            self.finish_reason = "length"
            piece += self.writer.flush()
        if self.writer.stopped:
            self.finish_reason = "stop"
        return self._event(token, piece, score)

    def _event(self, token: int | None, piece: str, score: TokenScore | None) -> Event:
        self.text += piece
        asked = self.task.request.logprobs is not None
        return Event(self.task.id, self.index, token, piece, score if asked else None, self.finish_reason)

    @property
    def mean(self) -> float:
        """The mean log-probability of what was drawn, by which the best answers are chosen."""
        return sum(s.logprob for s in self.scores) / max(1, len(self.scores))

    def choice(self, index: int) -> Choice:
        assert self.finish_reason is not None
        choice = Choice(index, self.tokens, self.text, self.finish_reason)
        if self.task.request.logprobs is not None:
            n = len(self.tokens)
            choice.scores, choice.end = self.scores[:n], next(iter(self.scores[n:]), None)
        return choice


@dataclass(eq=False)
class SequenceGroup:
    """A request in the engine, as its scheduler sees it."""

    id: int
    request: Request
    prompt: tuple[int, ...]  # what the decoder reads: the request's, or an encoder-decoder's first token
    size: int
    tokenizer: SupportsDecode | None
    n_read: int = 0
    state: State | None = None  # of a prompt that is read in parts
    last: Tensor | None = None  # (V,) logits after what was read, of a prompt that is scored
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    answers: list[GeneratedSequence] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, as if nothing had been read."""
        self.n_read, self.state, self.last, self.prompt_scores = 0, None, None, []
        n = self.request.best_of or self.request.n
        self.answers = [GeneratedSequence(self, i, self.tokenizer) for i in range(n)]

    @property
    def whole(self) -> bool:
        return self.request.source is not None

    @property
    def exact(self) -> bool:
        """Where a prompt is divided shows in the last digits of its scores."""
        return self.request.echo

    @property
    def n_left(self) -> int:
        left = len(self.prompt) - self.n_read
        return left + len(self.request.source or ()) if left else 0

    @property
    def n_rows(self) -> int:
        return len(self.answers)

    @property
    def done(self) -> bool:
        return all(a.finish_reason is not None for a in self.answers)

    def score_prompt(self, logits: Tensor) -> None:
        """Note the scores of the next T tokens of the prompt, given the logits (T, V) after each of them."""
        tokens = self.prompt[self.n_read : self.n_read + len(logits)]
        before = logits[:-1] if self.last is None else torch.cat([self.last[None], logits[:-1]])
        if self.last is None:
            self.prompt_scores.append(None)
        n_top = [self.request.logprobs or 0] * len(before)
        self.prompt_scores += token_scores(before, tokens[len(tokens) - len(before) :], n_top)

    def result(self) -> Result:
        """All answers, the best of them first where more were written than asked for."""
        chosen: Sequence[GeneratedSequence] = self.answers
        if len(chosen) > self.request.n:
            chosen = sorted(chosen, key=lambda a: -a.mean)[: self.request.n]
        choices = [answer.choice(i) for i, answer in enumerate(chosen)]
        if not self.request.echo:
            return Result(choices)
        return Result(choices, self.echoed)

    @property
    def echoed(self) -> list[TokenScore | None]:
        """The scores of the request's prompt, without an encoder-decoder's first token."""
        return self.prompt_scores[len(self.prompt) - len(self.request.prompt) :]
