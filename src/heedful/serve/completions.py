"""POST /v1/completions: what a model writes after a prompt, or, if it is an encoder-decoder, in answer to it.

The route of old clients, /v1/engines/{engine}/completions, is the same with the model's name in the path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.request import Choice, Result
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.serve.asks import Ask, Part, Reading, check_budget, check_room, check_speaks, sampling_of
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.logprobs import Entry, answer_entries, completion_logprobs, prompt_entries
from heedful.serve.replies import Line, Reply
from heedful.serve.request_schema import MAX_INT, CompletionRequest, Prompts
from heedful.serve.respond import reply_to
from heedful.serve.response_schema import CompletionResponse, streamed
from heedful.serve.worker import Worker

router = APIRouter()
LONG = 4096  # characters or tokens: more are read beside the event loop
ANSWERS = streamed("The completions, or with `stream` chunks of the same shape")


@router.post("/v1/completions", response_model=CompletionResponse, responses=ANSWERS)
async def complete(http: HttpRequest, body: CompletionRequest) -> Response:
    return await answer(http, body, body.model)


@router.post("/v1/engines/{engine:path}/completions", response_model=CompletionResponse, responses=ANSWERS)
async def complete_with_engine(http: HttpRequest, engine: str, body: CompletionRequest) -> Response:
    """The path that clients used before models had a field."""
    return await answer(http, body, engine)


async def answer(http: HttpRequest, body: CompletionRequest, name: str | None) -> Response:
    manager = http.app.state.manager
    check_asked(body, http.app.state.options.max_tokens_per_request)
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(manager.acquire(name))
        ask = await ask_of(body, worker)
        reply = Completion(ask, worker.loaded, name or manager.names[0], body.include_usage)
        return await reply_to(http, worker, ask, reply, stream=body.stream, held=held)


# --- what is asked --------------------------------------------------------------------------------------------------


def prompts_of(given: Prompts | None) -> Sequence[str | list[int]]:
    if given is None or isinstance(given, str):
        return [given or ""]  # an empty text is the start of one
    if isinstance(given[0], int):
        return [given]
    return given


def check_asked(body: CompletionRequest, most: int) -> None:
    """Before any model is loaded."""
    n_answers = max(body.n, body.best_of or 1)
    check_budget(len(prompts_of(body.prompt)), n_answers, body.max_tokens, most, "max_tokens")


async def ask_of(body: CompletionRequest, worker: Worker) -> Ask:
    loaded = worker.loaded
    check_speaks(loaded)
    if body.echo and not loaded.continues_prompt:
        raise ApiError(
            400,
            f"{loaded.name} answers its prompt instead of continuing it, and cannot echo it: leave out echo",
            param="echo",
        )
    prompts = prompts_of(body.prompt)
    long = sum(map(len, prompts)) > LONG
    with client_errors("prompt"):
        readings = await asyncio.to_thread(read, loaded, prompts) if long else read(loaded, prompts)
    for reading in readings:
        check_room(worker, reading, body.max_tokens, "prompt" if body.max_tokens == 0 else "max_tokens")
    with client_errors():
        return Ask(
            readings,
            sampling_of(body, loaded),
            body.max_tokens,
            body.n,
            max(body.n, body.best_of or 1),
            body.stop,
            body.logprobs,
            body.echo,
        )


def read(loaded: Loaded, prompts: Sequence[str | list[int]]) -> list[Reading]:
    """Texts as `Loaded.complete` reads them, token ids as they are."""
    return [
        loaded.encode_prompt(prompt) if isinstance(prompt, str) else read_ids(loaded, prompt, number)
        for number, prompt in enumerate(prompts)
    ]


def read_ids(loaded: Loaded, prompt: Sequence[int], number: int) -> Reading:
    size: int = getattr(loaded.model.config, "vocab_size", MAX_INT)
    if max(prompt) >= size:
        bad = next(id for id in prompt if id >= size)
        raise ValueError(f"token {bad} of prompt {number}: the vocabulary of {loaded.name} is 0 to {size - 1}")
    return (tuple(prompt), None) if loaded.continues_prompt else ((), tuple(prompt))


# --- what is answered -----------------------------------------------------------------------------------------------


class Completion(Reply):
    object = streamed = "text_completion"
    prefix = "cmpl"

    def choice(self, part: Part, choice: Choice, result: Result) -> dict[str, Any]:
        prompt, echo = self.ask.prompts[part.number][0], self.echo(part.number)
        text = choice.text if self.ask.scores_prompt else echo + choice.text
        found = None
        if self.ask.logprobs is not None:
            entries = self._prompt_entries(part, result.prompt_scores or ())
            entries += answer_entries(
                self.tokenizer,
                prompt,
                choice.tokens,
                choice.scores or (),
                start=len(echo),
                stop=len(text),
                end=choice.end,
            )
            found = completion_logprobs(entries, self.spelling)
        return {"text": text, "logprobs": found, "finish_reason": choice.finish_reason}

    def _prompt_entries(self, part: Part, scores: Sequence[Any]) -> list[Entry]:
        return prompt_entries(self.tokenizer, self.ask.prompts[part.number][0], scores) if scores else []

    def chunk(self, part: Part, event: Event) -> str:
        line = self.line(part, event.index)
        text, finish = event.piece, event.finish_reason
        if not line.begun and not self.ask.scores_prompt:
            text = self.echo(part.number) + text
        line.begun = True
        line.written += len(text)
        if event.token is not None:
            self.n_said += 1
        entries = self._entries(part, line, event) if line.follower is not None else []
        if finish == "error" or not (text or entries or finish):
            return ""
        scores = "null"
        if line.follower is not None:
            scores = json.dumps(completion_logprobs(entries, self.spelling), allow_nan=False)
        reason = f'"{finish}"' if finish else "null"
        return f'{line.begin}"text": {json.dumps(text)}, "logprobs": {scores}, "finish_reason": {reason}{self.close}'

    def _entries(self, part: Part, line: Line, event: Event) -> list[Entry]:
        """The tokens whose text is out."""
        assert line.follower is not None
        entries = self._prompt_entries(part, event.prompt_scores or ())
        if event.token is not None:
            line.follower.push(event.token, event.score)
        if event.finish_reason is None:
            return entries + line.follower.before(line.written)
        return entries + line.follower.rest(line.written, event.score if event.token is None else None)
