"""Requests and results of generation: plain data, validated when constructed.

Names and meanings are those of OpenAI's completions API where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from heedful.generate.grammar import Grammar

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; the filters apply in the order of these fields."""

    temperature: float = 1.0
    top_k: int | None = None  # only the k most likely (Fan et al. 2018)
    top_p: float = 1.0  # the fewest that together have this mass (Holtzman et al. 2020)
    min_p: float = 0.0  # at least this share of the likeliest one's probability (Nguyen et al. 2024)
    typical_p: float = 1.0  # this mass of those nearest to the entropy (Meister et al. 2023)
    repetition_penalty: float = 1.0  # divides the logits of generated and prompt tokens (Keskar et al. 2019)
    frequency_penalty: float = 0.0  # subtracted per occurrence of a generated token
    presence_penalty: float = 0.0  # subtracted once from generated tokens
    no_repeat_ngram_size: int = 0  # no n-gram of this size twice, the prompt's included (Paulus et al. 2018); 0: any
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to these tokens' logits
    seed: int | None = None  # the same seed gives the same text, whatever else is in the batch

    def __post_init__(self) -> None:
        self._within("temperature", 0, math.inf)
        self._within("top_p", 0, 1)
        self._within("min_p", 0, 1)
        self._within("typical_p", 0, 1)
        self._within("frequency_penalty", -2, 2)
        self._within("presence_penalty", -2, 2)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be 1 or more")
        if self.no_repeat_ngram_size < 0:
            raise ValueError(f"no_repeat_ngram_size is {self.no_repeat_ngram_size}: it must be 0 or more")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: it must be above 0")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias {{{token}: {bias}}}: token ids are 0 or more, biases from -100 to 100")

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and low <= value <= high):
            upper = f"from {low} to {high}" if math.isfinite(high) else f"{low} or more"
            raise ValueError(f"{name} is {value}: it must be {upper}")


@dataclass(frozen=True)
class Request:
    """One prompt and the parameters of its completion."""

    prompt: tuple[int, ...] = ()  # the decoder's input; may be empty for an encoder-decoder
    source: tuple[int, ...] | None = None  # the encoder's input
    max_tokens: int = 16
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # strings that end a sequence
    stop_ids: frozenset[int] = frozenset()  # tokens that end a sequence
    n: int = 1  # how many sequences
    best_of: int | None = None  # generate this many and keep the n of highest mean log-probability
    logprobs: int | None = None  # log-probabilities of each token and of this many likeliest ones
    echo: bool = False  # include the prompt in the text, and its scores
    first: int = 0  # index of the first sequence in the seed's streams: n sequences may be split over several requests
    min_tokens: int = 0  # no stop token before this many, and their text is not searched for stop strings
    include_stop_str_in_output: bool = False  # the stop string or stop token that ends a sequence is part of it
    skip_special_tokens: bool = True  # special tokens are no part of the text; else they are their names
    grammar: Grammar | None = None  # what each sequence must match; it ends where nothing more can follow

    def __post_init__(self) -> None:
        if self.max_tokens < 0 or (self.max_tokens == 0 and not self.echo):
            raise ValueError(f"max_tokens is {self.max_tokens}: it must be 1 or more (0 only with echo)")
        if self.n < 1 or (self.best_of is not None and self.best_of < self.n):
            raise ValueError(f"n is {self.n} and best_of {self.best_of}: n is 1 or more, best_of at least n")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs is {self.logprobs}: it must be 0 or more")
        if not 0 <= self.min_tokens <= max(self.max_tokens, 0):
            raise ValueError(f"min_tokens is {self.min_tokens}: it must be from 0 to max_tokens, {self.max_tokens}")
        if self.first < 0:
            raise ValueError(f"first is {self.first}: answers are counted from 0")
        if "" in self.stop:
            raise ValueError("an empty stop text would end every answer at once")


@dataclass(frozen=True)
class TokenScore:
    """A token's log-probability under the model itself (temperature 1, no filters), and the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Choice:
    """One generated sequence."""

    index: int
    tokens: list[int]
    text: str  # empty without a tokenizer; ends before a stop string, whose tokens stay in `tokens`
    finish_reason: FinishReason
    scores: list[TokenScore] | None = None  # of `tokens`, with logprobs
    score: float | None = None  # of the whole sequence, with beam search
    end: TokenScore | None = None  # of the token of `stop_ids` that ended it, with logprobs
    stop_sequence: str | None = None  # the stop string that ended it


@dataclass
class Result:
    """The choices of a request, and with echo the scores of its prompt (the first token has none)."""

    choices: list[Choice]
    prompt_scores: list[TokenScore | None] | None = None
