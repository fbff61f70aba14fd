"""POST /v1/chat/completions: the next message of a conversation, in the model's own chat template."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.defaults import CHAT_MAX_TOKENS, chat_max_tokens
from heedful.generate.grammar import Grammar
from heedful.generate.request import Choice, Result
from heedful.generate.sequence import Event
from heedful.loaded import Loaded
from heedful.serve.errors import ApiError, client_errors
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
from heedful.serve.logprobs import TokenLogprob, answer_logprobs, chat_logprobs
from heedful.serve.request_schema import ChatRequest
from heedful.serve.response_schema import ChatResponse, json_or_event_stream
from heedful.serve.tool_fields import ToolCalling
from heedful.serve.worker import Worker
from heedful.text.prompt import PromptOptions
from heedful.text.tool_calls import CallParser, parse_calls
from heedful.text.tools import ToolFormat, call_grammar, find_tool_format, uses_special_tokens
from heedful.text.warn import collect_warnings

router = APIRouter()
MakeFormatter = Callable[[GenerationSpec, Loaded, str, bool], ResponseFormatter]  # of the model's name, include_usage


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses=json_or_event_stream("The answers, or with `stream` chunks of them (chat.completion.chunk)"),
)
async def create_chat_completion(http: HttpRequest, body: ChatRequest) -> Response:
    """Generate the next message of a conversation."""
    return await chat_response(http, body, ChatFormatter)


async def chat_response(http: HttpRequest, body: ChatRequest, make_formatter: MakeFormatter) -> Response:
    """The next message of a conversation, full or streamed, in the format of an API."""
    manager, most = http.app.state.manager, http.app.state.options.max_tokens_per_request
    check_token_budget(1, body.n, body.max_completion_tokens or 1, most, "max_completion_tokens")
    async with AsyncExitStack() as resources:
        with client_errors():
            worker = await resources.enter_async_context(manager.acquire(body.model))
        spec = await chat_spec(body, worker, most)
        formatter = make_formatter(spec, worker.loaded, body.model or manager.names[0], body.include_usage)
        return await generate_response(http, worker, spec, formatter, stream=body.stream, resources=resources)


async def encode_chat(body: ChatRequest, worker: Worker) -> tuple[EncodedPrompt, list[str]]:
    """A conversation as token ids, and what the client should know of it."""
    require_generation(worker.loaded)
    options = chat_prompt_options(body, worker)
    with client_errors("messages"), collect_warnings() as told:
        async with worker.chat_encoders:  # a template is a program, of any speed: not on the event loop
            encoded = await asyncio.to_thread(worker.loaded.encode_prompt, body.turns, **options)
    return encoded, told


async def chat_spec(body: ChatRequest, worker: Worker, most: int) -> GenerationSpec:
    """What to generate, the conversation encoded; ApiError for what this model cannot do."""
    encoded, told = await encode_chat(body, worker)
    max_tokens = body.max_completion_tokens or default_max_tokens(worker, encoded, most // body.n)
    check_context_length(worker, encoded, max_tokens, "messages")
    params = generation_params(body, worker.loaded, max_tokens)
    if body.tool_calling is not None:
        params |= tool_params(body.tool_calling, worker.loaded, params["grammar"], params["grammar_field"])
    with client_errors():
        return GenerationSpec(
            [encoded],
            max_tokens=max_tokens,
            n=body.n,
            best_of=body.n,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            warnings=tuple(told),
            **params,
        )


def tool_params(calling: ToolCalling, loaded: Loaded, answer: Grammar | None, field: str) -> dict[str, Any]:
    """The fields of a GenerationSpec for an answer that may call tools, and else matches the grammar `answer`, which
    the body's `field` asks for."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.chat_template is not None
    special = tokenizer.target.special_tokens
    with client_errors("tools"):
        format = find_tool_format(tokenizer.chat_template)
    schema = None
    if answer is not None and not calling.required:
        schema = json.loads(answer.text) if answer.kind == "json_schema" else None
        if not isinstance(schema, dict) or format.alone:
            what = "text, since this model's calls are JSON too" if format.alone else "text, or JSON of a schema"
            raise ApiError(400, f"beside tools an answer can only be {what}: leave out one of them", param=field)
    lark = call_grammar(
        format, calling.tools, special, required=calling.required, parallel=calling.parallel, answer=schema
    )
    shown = {"skip_special_tokens": False} if uses_special_tokens(format, special) else {}
    return {"grammar": Grammar.lark(lark), "grammar_field": "tools", "tool_format": format, **shown}


def chat_prompt_options(body: ChatRequest, worker: Worker) -> PromptOptions:
    """How the conversation becomes token ids; ApiError for documents that the template has no place for."""
    tokenizer, begins = worker.loaded.tokenizer, body.add_generation_prompt
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents:
        if tokenizer is None or "documents" not in (tokenizer.chat_template or ""):
            raise ApiError(
                400, f"the chat template of {worker.loaded.name} has no place for documents: put them into a message",
                param="documents",
            )  # fmt: skip
        variables["documents"] = body.documents
    room = body.max_completion_tokens or chat_max_tokens(worker.max_context, {"truncate_prompt_tokens": -1})
    return {
        "chat": True,
        "add_special_tokens": body.add_special_tokens,
        "truncate_prompt_tokens": prompt_limit(body, worker, room),
        "continue_final_message": body.continue_final_message,
        "add_generation_prompt": not body.continue_final_message if begins is None else begins,
        "tools": body.tools if body.tool_calling is not None else None,
        "chat_template_kwargs": variables,
    }


def default_max_tokens(worker: Worker, encoded: EncodedPrompt, most: int) -> int:
    """The rest of the context, up to a limit."""
    prompt, _ = encoded  # empty for an encoder-decoder, whose source takes no positions of the answer
    left = most if worker.max_context is None else worker.max_context - len(prompt)
    return max(1, min(left, most, CHAT_MAX_TOKENS))


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool, with a new id."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class ChatDelta(NamedTuple):
    """A part of a message, as the `delta` of a chunk has it."""

    fields: dict[str, Any]
    entries: list[TokenLogprob] | None = None  # the log-probabilities of its tokens
    finish: str | None = None


class ChatFormatter(ResponseFormatter):
    """chat.completion objects and chat.completion.chunk events."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choice(self, sub: SubRequest, choice: Choice, result: Result) -> dict[str, Any]:
        """One of the choices of a full response, without its index."""
        found = None
        if choice.scores is not None:
            prompt, length = self.spec.prompts[sub.prompt][0], len(choice.text)
            skip = self.spec.skip_special_tokens
            entries = answer_logprobs(
                self.tokenizer, prompt, choice.tokens, choice.scores, start=0, stop=length, end=None, skip_special=skip
            )
            found = chat_logprobs(entries, self.token_text)
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish: str = choice.finish_reason
        if self.spec.tool_format is not None:
            answer = parse_calls(self.spec.tool_format, choice.text)
            message["content"] = answer.text or (None if answer.calls else "")
            if answer.calls:
                message["tool_calls"] = [new_call(call.name, call.arguments) for call in answer.calls]
            finish = "tool_calls" if finish == "stop" and answer.complete else finish
        return {"message": message, "logprobs": found, "finish_reason": finish}

    def chunk(self, sub: SubRequest, event: Event) -> str:
        """The server-sent events for one event of the engine; may be empty."""
        state = self.choice_state(sub, event.index)
        return "".join(self._encoded(state, delta) for delta in self.deltas(state, event))

    def deltas(self, state: ChoiceState, event: Event) -> Iterator[ChatDelta]:
        """What one event of the engine adds to a message."""
        text, finish = event.piece, event.finish_reason
        state.n_chars += len(text)
        if event.token is not None:
            self.n_generated += 1
        if finish == "error":
            return
        entries = self._released_logprobs(state, event)
        if self.spec.tool_format is not None:
            yield from self._call_deltas(state, self.spec.tool_format, event, entries)
            return
        if not state.started:
            state.started = True
            yield ChatDelta({"role": "assistant", "content": "", "refusal": None})
        if text or entries:
            yield ChatDelta({"content": text}, entries)
        if finish:
            yield ChatDelta({}, finish=finish)

    @staticmethod
    def _call_deltas(
        state: ChoiceState, format: ToolFormat, event: Event, entries: list[TokenLogprob]
    ) -> Iterator[ChatDelta]:
        """What one event adds to a message that may call tools: what it is, text or a call, may show later."""
        parser = state.calls = state.calls or CallParser(format)
        state.unsent += entries
        index, finish = len(parser.calls) - 1, event.finish_reason
        pieces = parser.push(event.piece) + (parser.finish() if finish else [])
        if not state.started and (pieces or finish):
            state.started = True
            calls_first = bool(pieces) and pieces[0][0] == "name"
            yield ChatDelta({"role": "assistant", "content": None if calls_first else "", "refusal": None})
        for kind, piece in pieces:
            fields: dict[str, Any] = {"content": piece}
            if kind == "name":
                index += 1
                fields = {"tool_calls": [{"index": index, **new_call(piece, "")}]}
            elif kind == "arguments":
                fields = {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            yield ChatDelta(fields, state.unsent or None)
            state.unsent = []
        if finish:
            yield ChatDelta({}, state.unsent or None, "tool_calls" if finish == "stop" and parser.complete else finish)

    def _encoded(self, state: ChoiceState, delta: ChatDelta) -> str:
        logprobs = "null"
        if state.logprobs is not None and delta.entries is not None:
            logprobs = json.dumps(chat_logprobs(delta.entries, self.token_text), allow_nan=False)
        reason = f'"{delta.finish}"' if delta.finish else "null"
        fields = f'"delta": {json.dumps(delta.fields)}, "logprobs": {logprobs}, "finish_reason": {reason}'
        return state.take_prefix() + fields + self.chunk_suffix

    @staticmethod
    def _released_logprobs(state: ChoiceState, event: Event) -> list[TokenLogprob]:
        """The tokens whose text is sent with this event or was before."""
        if state.logprobs is None:
            return []
        if event.token is not None:
            state.logprobs.push(event.token, event.score)
        if event.finish_reason is not None:
            return state.logprobs.finish(state.n_chars, None)
        return state.logprobs.release(state.n_chars)
