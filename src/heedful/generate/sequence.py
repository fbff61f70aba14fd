"""A request while the engine runs it: a `SequenceGroup` with its prefill, and each `GeneratedSequence` of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heedful.generate.detokenizer import StoppingDetokenizer, SupportsDecode
from heedful.generate.matcher import new_matcher
from heedful.generate.request import Choice, FinishReason, Request, Result, TokenScore
from heedful.generate.sampling import Sampler, token_scores
from heedful.generate.turns import Owner
from heedful.kernels.cuda.device_sampling import MAX_TOP
from heedful.nn.state import State


@dataclass
class Event:
    """A token was generated, or a sequence finished. The last event of a request carries its result, or its error."""

    id: int  # of the request
    index: int  # of the sequence in it
    token: int | None  # None for the echo of a prompt, a stop token, and an error
    piece: str  # new text that later tokens cannot change; may be empty
    score: TokenScore | None = None  # with logprobs; of a stop token too
    finish_reason: FinishReason | None = None
    result: Result | None = None
    error: Exception | None = None
    prompt_scores: list[TokenScore | None] | None = None  # with the echo of a prompt


class GeneratedSequence:
    """One of a request's n sequences while it is decoded: sampler, detokenizer, tokens and text so far."""

    def __init__(self, group: SequenceGroup, index: int, tokenizer: SupportsDecode | None) -> None:
        request = group.request
        self.group, self.index = group, index
        matcher = None
        if request.grammar is not None:
            matcher = new_matcher(tokenizer, request.grammar, request.stop_ids, at_start=not request.prompt)
        self.sampler = Sampler(
            request.sampling,
            request.prompt,
            request.first + index,
            min_tokens=request.min_tokens,
            stop_ids=request.stop_ids,
            matcher=matcher,
        )
        self.detokenizer = StoppingDetokenizer(
            tokenizer,
            request.stop,
            request.prompt,
            include_stop=request.include_stop_str_in_output,
            skip_special=request.skip_special_tokens,
        )
        self.tokens: list[int] = []
        self.text = ""
        self.scores: list[TokenScore] = []  # of all sampled tokens, a stop token too
        self.finish_reason: FinishReason | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        """How many alternatives to score beside each token; None if no scores are needed."""
        request = self.group.request
        ranked = request.best_of is not None and request.best_of > request.n
        return 0 if request.logprobs is None and ranked else request.logprobs

    @property
    def samples_on_device(self) -> bool:
        """Whether its next token can be sampled without the host."""
        n = self.n_top_logprobs
        return not self.sampler.needs_host and (n is None or n <= MAX_TOP)

    def echo(self, text: str) -> Event:
        """The event of the prompt's text, before the first token."""
        if not self.group.request.max_tokens:
            self.finish_reason = "length"
        event = self._event(None, text, None)
        event.prompt_scores = self.group.echo_scores
        return event

    def append(self, token: int, score: TokenScore | None, *, full: bool) -> Event:
        """Append a sampled token, check the stop conditions, detokenize; `full`: the model has no position for it."""
        if score is not None:
            self.scores.append(score)
        request, ends = self.group.request, token in self.group.request.stop_ids
        if ends and not request.include_stop_str_in_output:
            self.finish_reason = "stop"
            return self._event(None, self.detokenizer.flush(), score)
        self.tokens.append(token)
        piece = self.detokenizer.push(token, search=len(self.tokens) > request.min_tokens)
        ends = ends or (self.sampler.matcher is not None and self.sampler.matcher.complete)
        if not self.detokenizer.stopped and (ends or full or len(self.tokens) >= request.max_tokens):
            self.finish_reason = "stop" if ends else "length"
            piece += self.detokenizer.flush()
        if self.detokenizer.stopped:
            self.finish_reason = "stop"
        return self._event(token, piece, score)

    def _event(self, token: int | None, piece: str, score: TokenScore | None) -> Event:
        self.text += piece
        wanted = self.group.request.logprobs is not None
        return Event(self.group.id, self.index, token, piece, score if wanted else None, self.finish_reason)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the sampled tokens, by which `best_of` ranks sequences."""
        return sum(s.logprob for s in self.scores) / max(1, len(self.scores))

    def choice(self, index: int) -> Choice:
        """The finished sequence as a choice of the result."""
        assert self.finish_reason is not None
        choice = Choice(index, self.tokens, self.text, self.finish_reason)
        choice.stop_sequence = self.detokenizer.stop_sequence
        if self.group.request.logprobs is not None:
            n = len(self.tokens)
            choice.scores, choice.end = self.scores[:n], next(iter(self.scores[n:]), None)
        return choice


@dataclass(eq=False)
class SequenceGroup:
    """The sequences of one request, which share a prompt; a `Job` of the scheduler."""

    id: int
    request: Request
    prompt: tuple[int, ...]  # of the decoder: the request's, or an encoder-decoder's start token; see `preempt`
    cache_tokens: int
    tokenizer: SupportsDecode | None
    owner: Owner
    block: int = 1  # cache tokens are allocated in blocks of this size
    n_prefilled: int = 0
    state: State | None = None  # KV cache of a prompt that is prefilled in chunks
    last_logits: Tensor | None = None  # (V,) after the last chunk
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    n_resumed: int = 0  # generated tokens at the end of `prompt`, since it was preempted
    preempted: bool = False  # it was, once
    _sequences: list[GeneratedSequence] | None = None

    @property
    def sequences(self) -> list[GeneratedSequence]:
        """Made on first use: thousands may wait, and a grammar's state is large."""
        if self._sequences is None:
            self._sequences = [GeneratedSequence(self, i, self.tokenizer) for i in range(self.n_rows)]
        return self._sequences

    def reset(self) -> None:
        """Start the prefill over, and the sequences unless some of their tokens were sent already."""
        self.n_prefilled, self.state, self.last_logits, self.prompt_scores = 0, None, None, []
        if not self.preempted:
            self._sequences = None

    def preempt(self) -> None:
        """Begin again with the tokens generated so far as the end of the prompt; its memory is free already."""
        assert self.preemptible
        self.prompt, self.n_resumed = (*self.prompt, *self.sequences[0].tokens), len(self.sequences[0].tokens)
        self.preempted = True
        self.reset()

    def cached_tokens(self, sequence: GeneratedSequence) -> list[int]:
        """The tokens of the prompt and of one of its sequences."""
        return [*self.prompt, *sequence.tokens[self.n_resumed :]]

    @property
    def preemptible(self) -> bool:
        """Whether it can be preempted: one sequence of a decoder, and once."""
        return not (self.preempted or self.request.echo or self.request.source is not None or self.n_rows > 1)

    @property
    def held_tokens(self) -> int:
        """Tokens of the KV cache after the next step, which may prepare for one more."""
        n = len(self.prompt) + 1
        if self.n_rows == 1 and self._sequences is not None:
            n += len(self._sequences[0].tokens) - self.n_resumed
        return min(self.cache_tokens, self.n_rows * -(-n // self.block) * self.block)

    @property
    def atomic(self) -> bool:
        """An encoder-decoder's source is encoded in one pass."""
        return self.request.source is not None

    @property
    def fixed_chunks(self) -> bool:
        """Where a prompt is divided shows in the last digits of its scores."""
        return self.request.echo

    @property
    def n_left(self) -> int:
        """Prompt tokens that are not prefilled yet, those of the source included."""
        left = len(self.prompt) - self.n_prefilled
        return left + len(self.request.source or ()) if left else 0

    @property
    def n_rows(self) -> int:
        """Rows of the batch: one per sequence."""
        return self.request.best_of or self.request.n

    @property
    def finished(self) -> bool:
        """Whether every sequence has a finish reason."""
        return all(s.finish_reason is not None for s in self.sequences)

    def score_prompt(self, logits: Tensor) -> None:
        """Append the scores of the next T prompt tokens, given the logits (T, V) after each of them."""
        tokens = self.prompt[self.n_prefilled : self.n_prefilled + len(logits)]
        before = logits[:-1] if self.last_logits is None else torch.cat([self.last_logits[None], logits[:-1]])
        if self.last_logits is None:
            self.prompt_scores.append(None)
        n_top = [self.request.logprobs or 0] * len(before)
        self.prompt_scores += token_scores(before, tokens[len(tokens) - len(before) :], n_top)

    def result(self) -> Result:
        """The n choices; with best_of those of the highest mean log-probability, best first."""
        chosen: Sequence[GeneratedSequence] = self.sequences
        if len(chosen) > self.request.n:
            chosen = sorted(chosen, key=lambda s: -s.mean_logprob)[: self.request.n]
        choices = [sequence.choice(i) for i, sequence in enumerate(chosen)]
        return Result(choices, self.echo_scores if self.request.echo else None)

    @property
    def echo_scores(self) -> list[TokenScore | None]:
        """The scores of the request's prompt, without an encoder-decoder's start token."""
        return self.prompt_scores[len(self.prompt) - len(self.request.prompt) :]
