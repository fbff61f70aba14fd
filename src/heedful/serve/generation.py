"""Text generation over HTTP, as /v1/completions and /v1/chat/completions share it: from a checked body to the engine
and back.

    GenerationSpec      what to generate, checked against the model
    generate_response   submits it to the model's worker; a full JSON response, or a stream of server-sent events
    ResponseFormatter   the bodies and chunks of the response, in OpenAI's format
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.grammar import Grammar
from heedful.generate.request import Choice, Request, Result, Sampling
from heedful.loaded import Loaded
from heedful.models.vocabulary import check_token_ids, vocab_sizes
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, client_errors
from heedful.serve.event_stream import DONE, ChunkFormatter, EventStream
from heedful.serve.handle import GenerationHandle, HandleGroup, Wakeup, client_of, empty_result
from heedful.serve.logprobs import LogprobBuffer, TokenLogprob, token_text_of
from heedful.serve.request_schema import ChatRequest, SamplingRequest
from heedful.serve.worker import Worker
from heedful.text.tool_calls import CallParser
from heedful.text.tools import ToolFormat

LARGE = 4096  # log-probabilities: a body with more is made in a thread, beside the event loop

EncodedPrompt = tuple[tuple[int, ...], tuple[int, ...] | None]  # token ids for the decoder, and for the encoder


# --- what to generate -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationSpec:
    """What an HTTP request asks a model to generate."""

    prompts: Sequence[EncodedPrompt]
    sampling: Sampling
    max_tokens: int
    n: int = 1  # answers to each prompt
    best_of: int = 1  # how many are generated, to return the best n
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    grammar_field: str = "tools"  # the field of the body that asks for it
    tool_format: ToolFormat | None = None  # the form of calls in the answer, where it may have some
    warnings: tuple[str, ...] = ()  # about the prompts, for the client

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens of all prompts, for the usage."""
        return sum(len(prompt) + len(source or ()) for prompt, source in self.prompts)

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are wanted. An echo without them needs no model."""
        return self.echo and self.logprobs is not None


@dataclass(frozen=True)
class SubRequest:
    """One engine request among those that an HTTP request is split into."""

    request: Request | None  # None: nothing to compute
    prompt: int  # the index of its prompt
    first: int  # the index of its first answer among the response's choices
    n: int


def split_requests(spec: GenerationSpec, worker: Worker) -> list[SubRequest]:
    """The engine requests: one per prompt, or several where it has more answers than fit into a batch."""
    if not spec.max_tokens and not spec.scores_prompt:
        return [SubRequest(None, i, i * spec.n, spec.n) for i in range(len(spec.prompts))]
    logprobs = 0 if spec.logprobs is None and spec.best_of > spec.n else spec.logprobs
    found = []
    for i, (prompt, source) in enumerate(spec.prompts):
        # Torch's own random state is the same whenever a server starts.
        seed = secrets.randbits(63) if spec.sampling.seed is None else spec.sampling.seed
        whole = Request(
            prompt, source, spec.max_tokens, replace(spec.sampling, seed=seed), spec.stop, spec.stop_ids,
            logprobs=logprobs, echo=spec.scores_prompt, min_tokens=spec.min_tokens,
            include_stop_str_in_output=spec.include_stop_str_in_output, skip_special_tokens=spec.skip_special_tokens,
            grammar=spec.grammar,
        )  # fmt: skip
        most = worker.max_answers(whole)
        for first in range(0, spec.best_of, most):
            n = min(most, spec.best_of - first)
            found.append(SubRequest(replace(whole, n=n, first=first), i, i * spec.n + first, n))
    return found


def generation_params(body: SamplingRequest, loaded: Loaded, max_tokens: int) -> dict[str, Any]:
    """The fields of a GenerationSpec that say how to sample and when an answer ends: what a body asks for, over the
    model's defaults, without the tokens that the model's authors rule out."""
    for name, ids in ("logit_bias", list(body.logit_bias)), ("stop_token_ids", body.stop_token_ids):
        with client_errors(name):
            check_token_ids(ids, vocab_sizes(loaded.model)[1], name, loaded.name)
    names = {field.name for field in fields(Sampling)}
    given: Any = {name: getattr(body, name) for name in (names | {"min_tokens"}) & body.model_fields_set}
    with client_errors("model"):
        options = loaded.generation_options(stream=True, **given)
    chosen: Any = {name: value for name, value in options.items() if name in names}
    bias = dict.fromkeys(loaded.banned_ids, -100.0) | body.logit_bias
    with client_errors():
        sampling = Sampling(**{**chosen, "logit_bias": bias})
    ends = loaded.chat_eos_ids if isinstance(body, ChatRequest) else loaded.eos_ids
    own = () if body.ignore_eos else ends
    name, grammar = body.answer_grammar or ("tools", None)
    return {
        "sampling": sampling,
        "stop": body.stop,
        "stop_ids": frozenset([*own, *body.stop_token_ids]),
        "min_tokens": min(options.get("min_tokens", 0), max_tokens),
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "grammar": grammar,
        "grammar_field": name,
    }


def prompt_limit(body: SamplingRequest, worker: Worker, max_tokens: int) -> int | None:
    """truncate_prompt_tokens as a number of tokens; -1 is what an answer of max_tokens leaves of the context."""
    longest = worker.max_context
    if body.truncate_prompt_tokens != -1 or longest is None:
        return None if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    return max(1, longest - max_tokens) if worker.loaded.continues_prompt else longest


def require_generation(loaded: Loaded) -> None:
    """ApiError unless the model generates text."""
    with client_errors("model"):
        loaded.require("generate")
        if loaded.tokenizer is None:
            raise ValueError(f"{loaded.name} has no tokenizer: it can neither read text nor write it")


def check_context_length(worker: Worker, encoded: EncodedPrompt, max_tokens: int, param: str) -> None:
    """ApiError unless a prompt and its answer fit into the context: nothing is truncated silently."""
    prompt, source = encoded
    n, longest = len(prompt) + len(source or ()), worker.max_context
    if longest is None:
        return
    needed = n + max_tokens if source is None else max(n, max_tokens)  # an encoder has its own positions
    if needed > longest:
        raise ApiError(
            400,
            f"This model's maximum context length is {longest} tokens, however you requested {n + max_tokens} tokens "
            f"({n} in the prompt; {max_tokens} for the completion): shorten the prompt or ask for fewer",
            param=param,
            code="context_length_exceeded",
        )


def check_token_budget(n_prompts: int, n_answers: int, max_tokens: int, most: int, param: str) -> None:
    """ApiError if one request would generate more tokens than --max-tokens-per-request."""
    asked = n_prompts * n_answers * max(1, max_tokens)
    if asked > most:
        raise ApiError(
            400,
            f"{n_prompts} prompts x {n_answers} answers x {max_tokens} {param} are {asked} tokens, and this server "
            f"writes at most {most} for one request: ask for fewer",
            param=param,
        )


# --- dispatch ---------------------------------------------------------------------------------------------------------


async def generate_response(
    http: HttpRequest,
    worker: Worker,
    spec: GenerationSpec,
    formatter: ResponseFormatter,
    *,
    stream: bool,
    resources: AsyncExitStack,
) -> Response:
    """Submit to the worker, and return the full response or a stream, which keeps the resources until it ends."""
    if spec.grammar is not None:
        with client_errors(spec.grammar_field):
            await worker.compile_grammar(spec.grammar, at_start=not spec.prompts[0][0])
    with client_errors():
        subrequests = split_requests(spec, worker)
        group = submit(worker, subrequests, stream=stream, client=client_of(http))
    if stream:
        return EventStream(group, subrequests, formatter, resources.pop_all())
    results = await group.results(http)
    if results is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if n_logprobs(results) > LARGE:
        body = await asyncio.to_thread(formatter.body, subrequests, results)
    else:
        body = formatter.body(subrequests, results)
    return Response(body, media_type="application/json")


def submit(
    worker: Worker, subrequests: Sequence[SubRequest], *, stream: bool, client: str
) -> HandleGroup[GenerationHandle]:
    """Submit all sub-requests together, or none of them."""
    requests = [sub.request for sub in subrequests if sub.request is not None]
    if requests:  # then all of them have one
        return HandleGroup(worker.submit_all(requests, stream=stream, client=client))
    wakeup = Wakeup()
    return HandleGroup([empty_result(sub.n, wakeup) for sub in subrequests])


def n_logprobs(results: Sequence[Result]) -> int:
    """How many log-probabilities a response with these results has."""
    answers = sum(len(choice.scores or ()) for result in results for choice in result.choices)
    return answers + sum(len(result.prompt_scores or ()) * len(result.choices) for result in results)


# --- the format -------------------------------------------------------------------------------------------------------


@dataclass
class ChoiceState:
    """One choice of a stream so far."""

    prefix: str  # of its next chunk
    later_prefix: str  # of those after it
    logprobs: LogprobBuffer | None  # where log-probabilities are asked for
    n_chars: int = 0  # sent
    started: bool = False
    calls: CallParser | None = None  # where the answer may call tools
    unsent: list[TokenLogprob] = field(default_factory=list)  # those of text that may become a call

    def take_prefix(self) -> str:
        """What its next chunk begins with."""
        prefix, self.prefix = self.prefix, self.later_prefix
        return prefix


class ResponseFormatter(ChunkFormatter):
    """An endpoint's responses in OpenAI's format: `body` for the full one, `chunk` and `final_chunk` for a stream."""

    object: str  # the type of the full response
    chunk_object: str  # and of a chunk
    id_prefix: str

    def __init__(self, spec: GenerationSpec, loaded: Loaded, model: str, include_usage: bool) -> None:
        assert loaded.tokenizer is not None
        self.spec, self.tokenizer = spec, loaded.tokenizer.target
        self.token_text = token_text_of(self.tokenizer)
        self.id, self.created, self.model = f"{self.id_prefix}-{secrets.token_hex(12)}", int(time.time()), model
        self.include_usage = include_usage
        self.n_generated = 0
        self._echoes: dict[int, str] = {}
        self._choices: dict[int, ChoiceState] = {}

    @abstractmethod
    def choice(self, sub: SubRequest, choice: Choice, result: Result) -> dict[str, Any]:
        """One of the choices of a full response, without its index."""

    def body(self, subrequests: Sequence[SubRequest], results: Sequence[Result]) -> bytes:
        """The full response as JSON."""
        spec, by_prompt = self.spec, [list[tuple[SubRequest, Choice, Result]]() for _ in self.spec.prompts]
        for sub, result in zip(subrequests, results, strict=True):
            by_prompt[sub.prompt] += [(sub, choice, result) for choice in result.choices]
            self.n_generated += sum(len(choice.tokens) for choice in result.choices)
        choices = []
        for i, answers in enumerate(by_prompt):
            if spec.best_of > spec.n:
                answers = sorted(answers, key=lambda answer: -mean_logprob(answer[1]))[: spec.n]
            choices += [{"index": i * spec.n + k, **self.choice(*answer)} for k, answer in enumerate(answers)]
        whole = {**self.envelope(self.object), "choices": choices, "usage": self.usage(), **self.warnings()}
        return json.dumps(whole, allow_nan=False).encode()

    def envelope(self, object: str) -> dict[str, Any]:
        """The fields that a full response and every chunk begin with."""
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    def warnings(self) -> dict[str, list[str]]:
        """A field that OpenAI's API does not have, in a full response and in the first chunk of each choice; none if
        there is nothing to warn of."""
        return {"warnings": list(self.spec.warnings)} if self.spec.warnings else {}

    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        n = self.spec.n_prompt_tokens
        return {"prompt_tokens": n, "completion_tokens": self.n_generated, "total_tokens": n + self.n_generated}

    def echoed_prompt(self, index: int) -> str:
        """The text of a prompt where `echo` makes it a part of the answer, else nothing."""
        if not self.spec.echo:
            return ""
        if index not in self._echoes:
            self._echoes[index] = self.tokenizer.decode(self.spec.prompts[index][0])
        return self._echoes[index]

    def choice_state(self, sub: SubRequest, index: int) -> ChoiceState:
        """The choice of a stream for the sub-request's answer of this index."""
        index += sub.first
        if index not in self._choices:
            logprobs = None
            if self.spec.logprobs is not None:
                prompt, start = self.spec.prompts[sub.prompt][0], len(self.echoed_prompt(sub.prompt))
                skip = self.spec.skip_special_tokens
                logprobs = LogprobBuffer(self.tokenizer, prompt, start, skip_special=skip)
            envelope = self.envelope(self.chunk_object)
            first, later = (
                f'data: {json.dumps(fields)[:-1]}, "choices": [{{"index": {index}, '
                for fields in (envelope | self.warnings(), envelope)
            )
            self._choices[index] = ChoiceState(first, later, logprobs)
        return self._choices[index]

    @property
    def chunk_suffix(self) -> str:
        """What every chunk ends with."""
        return '}], "usage": null}\n\n' if self.include_usage else "}]}\n\n"

    def final_chunk(self) -> str:
        """The end of a stream, with the usage where it is asked for."""
        if not self.include_usage:
            return DONE
        last = {**self.envelope(self.chunk_object), "choices": [], "usage": self.usage()}
        return f"data: {json.dumps(last)}\n\n{DONE}"


def mean_logprob(choice: Choice) -> float:
    """The mean log-probability of all tokens that were sampled, by which `best_of` ranks answers."""
    sampled = [*(choice.scores or ()), *([choice.end] if choice.end else ())]
    return sum(score.logprob for score in sampled) / max(1, len(sampled))
