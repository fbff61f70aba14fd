"""POST /v1/completions: the continuation of a prompt, or an encoder-decoder's answer to it.

/v1/engines/{engine}/completions, which old clients use, is the same with the model's name in the path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.request import Choice, Result
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.models.vocabulary import check_token_ids, vocab_sizes
from heedful.serve.errors import ApiError, client_errors
from heedful.serve.field_types import Prompts
from heedful.serve.generation import (
    ChoiceState,
    EncodedPrompt,
    GenerationSpec,
    ResponseFormatter,
    SubRequest,
    check_context_length,
    check_token_budget,
    generate_response,
    generation_params,
    prompt_limit,
    require_generation,
)
from heedful.serve.logprobs import TokenLogprob, answer_logprobs, completion_logprobs, prompt_logprobs
from heedful.serve.request_schema import CompletionRequest
from heedful.serve.response_schema import CompletionResponse, json_or_event_stream
from heedful.serve.worker import Worker
from heedful.text.prompt import PromptOptions, encode_fill_in_the_middle
from heedful.text.warn import collect_warnings

router = APIRouter()
LONG = 4096  # characters or tokens: more are encoded in a thread, beside the event loop
PROMPT = 64  # characters that a prompt takes as long as, however short it is
RESPONSES = json_or_event_stream("The completions, or with `stream` chunks of the same shape")


@router.post("/v1/completions", response_model=CompletionResponse, responses=RESPONSES)
async def create_completion(http: HttpRequest, body: CompletionRequest) -> Response:
    """Complete one or several prompts."""
    return await completion_response(http, body, body.model)


@router.post("/v1/engines/{engine:path}/completions", response_model=CompletionResponse, responses=RESPONSES)
async def create_engine_completion(http: HttpRequest, engine: str, body: CompletionRequest) -> Response:
    """The path that clients used before models had a field."""
    return await completion_response(http, body, engine)


async def completion_response(http: HttpRequest, body: CompletionRequest, name: str | None) -> Response:
    """The response of the model of this name, full or streamed."""
    manager, most = http.app.state.manager, http.app.state.options.max_tokens_per_request
    n_answers = max(body.n, body.best_of or 1)
    check_token_budget(len(prompt_list(body.prompt)), n_answers, body.max_tokens, most, "max_tokens")
    async with AsyncExitStack() as resources:
        with client_errors():
            worker = await resources.enter_async_context(manager.acquire(name))
        spec = await completion_spec(body, worker)
        formatter = CompletionFormatter(spec, worker.loaded, name or manager.names[0], body.include_usage)
        return await generate_response(http, worker, spec, formatter, stream=body.stream, resources=resources)


async def completion_spec(body: CompletionRequest, worker: Worker) -> GenerationSpec:
    """What to generate, the prompts encoded; ApiError for what this model cannot do."""
    loaded = worker.loaded
    require_generation(loaded)
    if body.echo and not loaded.continues_prompt:
        raise ApiError(
            400,
            f"{loaded.name} answers its prompt instead of continuing it, and cannot echo it: leave out echo",
            param="echo",
        )
    params = generation_params(body, loaded, body.max_tokens)
    limit, told = prompt_limit(body, worker, body.max_tokens), list[str]()
    if body.suffix:
        encoded, end = fill_in_the_middle(loaded, body, limit)
        params["stop_ids"] |= frozenset() if end is None or body.ignore_eos else {end}
    else:
        prompts = prompt_list(body.prompt)
        how: PromptOptions = {
            "allow_special": body.allow_special,
            "add_special_tokens": body.add_special_tokens,
            "truncate_prompt_tokens": limit,
        }
        encode = partial(encode_prompts, loaded, prompts, how)
        with client_errors("prompt"), collect_warnings(told):
            encoded = await asyncio.to_thread(encode) if sum(len(p) + PROMPT for p in prompts) > LONG else encode()
    for prompt in encoded:
        check_context_length(worker, prompt, body.max_tokens, "prompt" if body.max_tokens == 0 else "max_tokens")
    with client_errors():
        return GenerationSpec(
            encoded,
            max_tokens=body.max_tokens,
            n=body.n,
            best_of=max(body.n, body.best_of or 1),
            logprobs=body.logprobs,
            echo=body.echo,
            warnings=tuple(told),
            **params,
        )


def fill_in_the_middle(
    loaded: Loaded, body: CompletionRequest, limit: int | None
) -> tuple[list[EncodedPrompt], int | None]:
    """The prompt for what stands between `prompt` and `suffix`, and the token that ends it; ApiError if the model
    cannot do that."""
    assert loaded.tokenizer is not None and not isinstance(body.prompt, list)
    with client_errors("suffix"):
        if not loaded.continues_prompt:
            raise ValueError(f"{loaded.name} answers its prompt and cannot fill in the middle: leave out suffix")
        ids, end = encode_fill_in_the_middle(loaded.tokenizer, body.prompt or "", body.suffix)
        if limit is not None and len(ids) > limit:
            raise ValueError(f"prompt and suffix have {len(ids)} tokens, and with a suffix nothing is truncated")
    return [(tuple(ids), None)], end


def prompt_list(given: Prompts | None) -> Sequence[str | list[int]]:
    """The field's four shapes as a list of prompts; no prompt is the start of a text."""
    if given is None or isinstance(given, str):
        return [given or ""]
    if isinstance(given[0], int):
        return [given]
    return given


def encode_prompts(loaded: Loaded, prompts: Sequence[str | list[int]], options: PromptOptions) -> list[EncodedPrompt]:
    """Texts encoded as `Loaded.complete` does it; token ids as they are, if the vocabulary has them. Of more than
    `truncate_prompt_tokens`, the last."""
    encoded, limit = list[EncodedPrompt](), options.get("truncate_prompt_tokens")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            encoded.append(loaded.encode_prompt(prompt, **options))
        else:
            check_token_ids(prompt, vocab_sizes(loaded.model)[0], f"prompt {i}", loaded.name)
            ids = tuple(prompt if limit is None else prompt[-limit:])
            encoded.append((ids, None) if loaded.continues_prompt else ((), ids))
    return encoded


class CompletionFormatter(ResponseFormatter):
    """text_completion objects, full or as the events of a stream."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def choice(self, sub: SubRequest, choice: Choice, result: Result) -> dict[str, Any]:
        """One of the choices of a full response, without its index."""
        prompt, echo = self.spec.prompts[sub.prompt][0], self.echoed_prompt(sub.prompt)
        text = choice.text if self.spec.scores_prompt else echo + choice.text
        found = None
        if self.spec.logprobs is not None:
            entries = self._prompt_logprobs(sub, result.prompt_scores or ())
            entries += answer_logprobs(
                self.tokenizer,
                prompt,
                choice.tokens,
                choice.scores or (),
                start=len(echo),
                stop=len(text),
                end=choice.end,
                skip_special=self.spec.skip_special_tokens,
            )
            found = completion_logprobs(entries, self.token_text)
        return {"text": text, "logprobs": found, "finish_reason": choice.finish_reason}

    def _prompt_logprobs(self, sub: SubRequest, scores: Sequence[Any]) -> list[TokenLogprob]:
        return prompt_logprobs(self.tokenizer, self.spec.prompts[sub.prompt][0], scores) if scores else []

    def chunk(self, sub: SubRequest, event: Event) -> str:
        """The server-sent events for one event of the engine; may be empty."""
        state = self.choice_state(sub, event.index)
        text, finish = event.piece, event.finish_reason
        if not state.started and not self.spec.scores_prompt:
            text = self.echoed_prompt(sub.prompt) + text
        state.started = True
        state.n_chars += len(text)
        if event.token is not None:
            self.n_generated += 1
        entries = self._released_logprobs(sub, state, event)
        if finish == "error" or not (text or entries or finish):
            return ""
        logprobs = "null"
        if state.logprobs is not None:
            logprobs = json.dumps(completion_logprobs(entries, self.token_text), allow_nan=False)
        reason = f'"{finish}"' if finish else "null"
        fields = f'"text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": {reason}'
        return state.take_prefix() + fields + self.chunk_suffix

    def _released_logprobs(self, sub: SubRequest, state: ChoiceState, event: Event) -> list[TokenLogprob]:
        """The tokens whose text is sent with this event or was before."""
        if state.logprobs is None:
            return []
        entries = self._prompt_logprobs(sub, event.prompt_scores or ())
        if event.token is not None:
            state.logprobs.push(event.token, event.score)
        if event.finish_reason is None:
            return entries + state.logprobs.release(state.n_chars)
        return entries + state.logprobs.finish(state.n_chars, event.score if event.token is None else None)
