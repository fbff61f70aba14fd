"""What an HTTP request asks of a model, checked against it, and the engine's requests that it becomes.

A prompt becomes one request of the engine, or several where more answers are wanted than fit into a batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heedful.generate.request import Request, Sampling
from heedful.loaded import Loaded
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.request_schema import MAX_INT, SamplingRequest
from heedful.serve.worker import Worker

Reading = tuple[tuple[int, ...], tuple[int, ...] | None]  # what the decoder continues, what the encoder reads


@dataclass(frozen=True)
class Ask:
    """What an HTTP request asks of a model."""

    prompts: Sequence[Reading]
    how: Sampling
    max_tokens: int
    n: int = 1  # answers to each prompt
    written: int = 1  # how many are written, to choose the best n of them
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False

    @property
    def n_prompt_tokens(self) -> int:
        return sum(len(prompt) + len(source or ()) for prompt, source in self.prompts)

    @property
    def scores_prompt(self) -> bool:
        """An echo without scores needs no model: we know the prompt."""
        return self.echo and self.logprobs is not None


@dataclass(frozen=True)
class Part:
    """One request of the engine among those of an HTTP request."""

    request: Request | None  # None: there is nothing to say
    number: int  # of its prompt
    first: int  # the index of its first answer in the reply
    n: int


def parts_of(ask: Ask, worker: Worker, stop_ids: frozenset[int]) -> list[Part]:
    """The requests of the engine, none of more answers than can be written at once."""
    if not ask.max_tokens and not ask.scores_prompt:
        return [Part(None, number, number * ask.n, ask.n) for number in range(len(ask.prompts))]
    scored = 0 if ask.logprobs is None and ask.written > ask.n else ask.logprobs
    found = []
    for number, (prompt, source) in enumerate(ask.prompts):
        # Torch's own state is the same whenever a server starts; by chance means by chance.
        seed = secrets.randbits(63) if ask.how.seed is None else ask.how.seed
        whole = Request(
            prompt,
            source,
            ask.max_tokens,
            replace(ask.how, seed=seed),
            ask.stop,
            stop_ids,
            logprobs=scored,
            echo=ask.scores_prompt,
        )
        most = worker.rows_for(whole)
        for first in range(0, ask.written, most):
            n = min(most, ask.written - first)
            found.append(Part(replace(whole, n=n, first=first), number, number * ask.n + first, n))
    return found


def sampling_of(body: SamplingRequest, loaded: Loaded) -> Sampling:
    """How to choose tokens, as the client and the model's authors have it."""
    config = loaded.model.config
    size: int = getattr(config, "n_target", getattr(config, "vocab_size", MAX_INT))
    if bad := [str(id) for id in body.logit_bias if id >= size]:
        raise ApiError(
            400,
            f"logit_bias has {', '.join(bad[:20])}: the vocabulary of {loaded.name} is 0 to {size - 1}",
            param="logit_bias",
        )
    return Sampling(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=dict.fromkeys(loaded.banned_ids, -100.0) | body.logit_bias,
        seed=body.seed,
    )


def check_speaks(loaded: Loaded) -> None:
    with client_errors("model"):
        loaded.require("generate")
        if loaded.tokenizer is None:
            raise ValueError(f"{loaded.name} has no tokenizer: it can neither read text nor write it")


def check_room(worker: Worker, reading: Reading, max_tokens: int, param: str) -> None:
    """A prompt and its answer must fit into the context: nothing is cut in silence."""
    prompt, source = reading
    n, longest = len(prompt) + len(source or ()), worker.longest
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


def check_budget(n_prompts: int, n_answers: int, max_tokens: int, most: int, param: str) -> None:
    """One request may not keep the server for itself."""
    asked = n_prompts * n_answers * max(1, max_tokens)
    if asked > most:
        raise ApiError(
            400,
            f"{n_prompts} prompts x {n_answers} answers x {max_tokens} {param} are {asked} tokens, and this server "
            f"writes at most {most} for one request: ask for fewer",
            param=param,
        )
