"""POST /v1/chat/completions: the next turn of a conversation, in the model's own chat template."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.generate.request import Choice, Result
from heedful.generate.sequence import Event
from heedful.serve.asks import Ask, Part, Reading, check_budget, check_room, check_speaks, sampling_of
from heedful.serve.errors import client_errors
from heedful.serve.logprobs import Entry, answer_entries, chat_logprobs
from heedful.serve.replies import Line, Reply
from heedful.serve.request_schema import ChatRequest
from heedful.serve.respond import reply_to
from heedful.serve.response_schema import ChatResponse, streamed
from heedful.serve.worker import Worker

router = APIRouter()
# Tokens of an answer to a client that names no limit: it has asked for a turn, and some models never end theirs.
UNASKED = 2048


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses=streamed("The answers, or with `stream` chunks of them (chat.completion.chunk)"),
)
async def chat(http: HttpRequest, body: ChatRequest) -> Response:
    manager, most = http.app.state.manager, http.app.state.options.max_tokens_per_request
    check_budget(1, body.n, body.max_completion_tokens or 1, most, "max_completion_tokens")
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(manager.acquire(body.model))
        ask = await ask_of(body, worker, most)
        reply = Chat(ask, worker.loaded, body.model or manager.names[0], body.include_usage)
        return await reply_to(http, worker, ask, reply, stream=body.stream, held=held)


async def ask_of(body: ChatRequest, worker: Worker, most: int) -> Ask:
    loaded = worker.loaded
    check_speaks(loaded)
    with client_errors("messages"):  # a template is a program: beside the event loop
        reading = await asyncio.to_thread(loaded.encode_prompt, body.turns, True)
    max_tokens = body.max_completion_tokens or rest_of(worker, reading, most // body.n)
    check_room(worker, reading, max_tokens, "messages")
    with client_errors():
        return Ask(
            [reading],
            sampling_of(body, loaded),
            max_tokens,
            body.n,
            body.n,
            body.stop,
            (body.top_logprobs or 0) if body.logprobs else None,
        )


def rest_of(worker: Worker, reading: Reading, most: int) -> int:
    """How long an answer may be to a client that does not say: the rest of the context, within reason."""
    prompt, _ = reading  # nothing, of an encoder-decoder: what its encoder reads takes none of the answer's room
    room = most if worker.longest is None else worker.longest - len(prompt)
    return max(1, min(room, most, UNASKED))


class Chat(Reply):
    object, streamed = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, part: Part, choice: Choice, result: Result) -> dict[str, Any]:
        found = None
        if choice.scores is not None:
            prompt, length = self.ask.prompts[part.number][0], len(choice.text)
            entries = answer_entries(
                self.tokenizer, prompt, choice.tokens, choice.scores, start=0, stop=length, end=None
            )
            found = chat_logprobs(entries, self.spelling)
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": found, "finish_reason": choice.finish_reason}

    def chunk(self, part: Part, event: Event) -> str:
        line = self.line(part, event.index)
        text, finish = event.piece, event.finish_reason
        line.written += len(text)
        if event.token is not None:
            self.n_said += 1
        if finish == "error":
            return ""
        entries = self._entries(line, event)
        chunks = ""
        if not line.begun:
            line.begun = True
            chunks = self._delta(line, '{"role": "assistant", "content": "", "refusal": null}')
        if text or entries:
            chunks += self._delta(line, f'{{"content": {json.dumps(text)}}}', entries)
        return chunks + self._delta(line, "{}", finish=finish) if finish else chunks

    def _delta(self, line: Line, delta: str, entries: list[Entry] | None = None, finish: str | None = None) -> str:
        scores = "null"
        if line.follower is not None and entries is not None:
            scores = json.dumps(chat_logprobs(entries, self.spelling), allow_nan=False)
        reason = f'"{finish}"' if finish else "null"
        return f'{line.begin}"delta": {delta}, "logprobs": {scores}, "finish_reason": {reason}{self.close}'

    @staticmethod
    def _entries(line: Line, event: Event) -> list[Entry]:
        """The tokens whose text is out."""
        if line.follower is None:
            return []
        if event.token is not None:
            line.follower.push(event.token, event.score)
        ended = event.finish_reason is not None
        return line.follower.rest(line.written, None) if ended else line.follower.before(line.written)
