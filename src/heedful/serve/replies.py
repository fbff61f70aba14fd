"""What completions and chats share of a reply: its head, its choices, its chunks, its usage."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heedful.generate.request import Choice, Result
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.serve.asks import Ask, Part
from heedful.serve.logprobs import Follower, spelling_of


@dataclass
class Line:
    """One choice of a stream."""

    begin: str  # of its chunks
    follower: Follower | None  # where log-probabilities are asked for
    written: int = 0  # characters
    begun: bool = False


class Reply(ABC):
    """What an endpoint says: the whole at once or, with `chunk` and `end`, as it comes."""

    object: str  # what OpenAI calls the whole
    streamed: str  # and a chunk
    prefix: str  # of its id

    def __init__(self, ask: Ask, loaded: Loaded, model: str, include_usage: bool) -> None:
        assert loaded.tokenizer is not None
        self.ask, self.tokenizer = ask, loaded.tokenizer.target
        self.spelling = spelling_of(self.tokenizer)
        self.id, self.created, self.model = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time()), model
        self.include_usage = include_usage
        self.n_said = 0
        self._echoes: dict[int, str] = {}
        self._lines: dict[int, Line] = {}

    @abstractmethod
    def choice(self, part: Part, choice: Choice, result: Result) -> dict[str, Any]:
        """One of the choices of a whole reply; its index is there already."""

    @abstractmethod
    def chunk(self, part: Part, event: Event) -> str:
        """What an event is to a stream: lines of it, or nothing."""

    def whole(self, parts: Sequence[Part], results: Sequence[Result]) -> bytes:
        ask, by_prompt = self.ask, [list[tuple[Part, Choice, Result]]() for _ in self.ask.prompts]
        for part, result in zip(parts, results, strict=True):
            by_prompt[part.number] += [(part, choice, result) for choice in result.choices]
            self.n_said += sum(len(choice.tokens) for choice in result.choices)
        choices = []
        for number, answers in enumerate(by_prompt):
            if ask.written > ask.n:
                answers = sorted(answers, key=lambda answer: -mean(answer[1]))[: ask.n]
            choices += [{"index": number * ask.n + i, **self.choice(*answer)} for i, answer in enumerate(answers)]
        return json.dumps(
            {**self.head(self.object), "choices": choices, "usage": self.usage()}, allow_nan=False
        ).encode()

    def head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, int]:
        n = self.ask.n_prompt_tokens
        return {"prompt_tokens": n, "completion_tokens": self.n_said, "total_tokens": n + self.n_said}

    def echo(self, number: int) -> str:
        """The text of a prompt, where it is a part of the reply."""
        if not self.ask.echo:
            return ""
        if number not in self._echoes:
            self._echoes[number] = self.tokenizer.decode(self.ask.prompts[number][0])
        return self._echoes[number]

    def line(self, part: Part, number: int) -> Line:
        """The choice of a stream that an event of the engine's belongs to."""
        index = part.first + number
        if index not in self._lines:
            follower = None
            if self.ask.logprobs is not None:
                prompt = self.ask.prompts[part.number][0]
                follower = Follower(self.tokenizer, prompt, len(self.echo(part.number)))
            head = json.dumps(self.head(self.streamed))
            self._lines[index] = Line(f'data: {head[:-1]}, "choices": [{{"index": {index}, ', follower)
        return self._lines[index]

    @property
    def close(self) -> str:
        """What every chunk ends with."""
        return '}], "usage": null}\n\n' if self.include_usage else "}]}\n\n"

    def end(self) -> str:
        """The last chunk of a stream, where its usage is asked for."""
        if not self.include_usage:
            return ""
        last = {**self.head(self.streamed), "choices": [], "usage": self.usage()}
        return f"data: {json.dumps(last)}\n\n"


def mean(choice: Choice) -> float:
    """The mean log-probability of all that was drawn, by which the best answers are chosen."""
    drawn = [*(choice.scores or ()), *([choice.end] if choice.end else ())]
    return sum(score.logprob for score in drawn) / max(1, len(drawn))
