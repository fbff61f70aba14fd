"""Streams: joined they are the whole reply; errors, silences, slow readers and those that go away."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from heedful.generate.model_runner import ModelRunner
from heedful.loaded import Loaded
from heedful.serve import event_stream
from support.folders import tiny_gpt
from support.in_process import Answer, Gate, InProcessServer, until
from support.serving import CHATML, words

GREEDY = {"temperature": 0}
FOREVER = {"ignore_eos": True}


@pytest.fixture(scope="module")
def inside():
    tokenizer = words()
    tokenizer.chat_template = CHATML
    model = tiny_gpt(vocab_size=len(tokenizer), max_len=256)
    with InProcessServer(Loaded(model, tokenizer, "small"), max_rows=4, chunk=32) as found:
        yield found


@pytest.fixture
def worker(inside):
    """Idle before and after."""
    found = inside.manager.workers["small"]
    yield found
    inside.runner.run(until(lambda: not found.busy and not found.n_running))
    assert inside.manager.n_users == 0


def joined(answer: Answer, index: int) -> dict:
    """The choice of a whole reply that a stream's chunks add up to."""
    parts = [c for chunk in answer.chunks for c in chunk["choices"] if c["index"] == index]
    scores = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    together = {k: [x for s in scores for x in s[k]] for k in scores[0]} if scores else None
    text = "".join(part["text"] for part in parts)
    return {"index": index, "text": text, "logprobs": together, "finish_reason": parts[-1]["finish_reason"]}


# --- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_tokens=30),
        dict(max_tokens=30, n=6, prompt=["the cat", "a"]),
        dict(max_tokens=30, logprobs=2),
        dict(max_tokens=30, logprobs=0, stop=["e", " t", "\ufffd"]),
        dict(max_tokens=12, logprobs=1, n=5, echo=True, stop=["s"]),
        dict(max_tokens=9, echo=True),
        dict(max_tokens=0, logprobs=1, echo=True, n=2),
        dict(max_tokens=0, echo=True),
        dict(max_tokens=0, n=2),
        dict(max_tokens=30, logprobs=1, logit_bias={"342": 8}),
    ],
    ids=lambda s: " ".join(s),
)
def test_a_stream_adds_up_to_the_whole_reply(inside, seed, settings):
    body = {"prompt": "the small cat", **settings, "seed": seed}
    whole = inside.complete(**body).json
    answer = inside.complete(**body, stream=True, stream_options={"include_usage": True})
    *chunks, last = answer.chunks
    assert [joined(answer, i) for i in range(len(whole["choices"]))] == whole["choices"]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["id"] for chunk in answer.chunks} == {last["id"]} and last["id"] != whole["id"]


def test_chunks_have_the_shape_of_the_reply(inside):
    answer = inside.complete("the", stream=True, max_tokens=20, logprobs=2)
    assert answer.headers["cache-control"] == "no-cache"
    for chunk in answer.chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}  # usage only where asked for
        assert len(chunk["choices"]) == 1 and set(chunk["choices"][0]) == {
            "index", "text", "logprobs", "finish_reason"
        }  # fmt: skip
        if chunk["choices"][0]["finish_reason"] is None:
            chunk["choices"][0]["finish_reason"] = "stop"  # OpenAI's types have no place for null
        Completion.model_validate_json(json.dumps(chunk), strict=True)


def test_no_piece_ends_in_half_a_character(inside):
    answer = inside.complete("the", stream=True, max_tokens=200, seed=1)
    whole = inside.complete("the", max_tokens=200, seed=1).json["choices"][0]["text"]
    assert answer.said() == whole and not whole.isascii()


@pytest.mark.parametrize("settings", [{}, {"logprobs": True, "top_logprobs": 2, "stop": ["e"]}, {"n": 6}])
def test_chat_chunks(inside, settings):
    body = dict(max_tokens=15, seed=5, **settings)
    whole = inside.chat("the cat", **body).json
    answer = inside.chat("the cat", **body, stream=True, stream_options={"include_usage": True})
    for chunk in answer.chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    assert answer.chunks[-1]["choices"] == [] and answer.chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in answer.chunks}) == 1
    for expected in whole["choices"]:
        parts = [c for chunk in answer.chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        first, *middle, last = parts
        assert first["delta"]["role"] == "assistant" and first["finish_reason"] is None
        assert last["delta"] == {} and last["finish_reason"] == expected["finish_reason"]
        assert all(set(part["delta"]) == {"content"} for part in middle)
        assert answer.said(expected["index"]) == expected["message"]["content"]
        if expected["logprobs"]:
            together = [entry for part in middle for entry in part["logprobs"]["content"]]
            assert together == expected["logprobs"]["content"]


def test_choices_come_side_by_side(inside):
    answer = inside.complete("the", stream=True, n=3, max_tokens=20, **FOREVER)
    order = [chunk["choices"][0]["index"] for chunk in answer.chunks]
    assert set(order) == {0, 1, 2} and order != sorted(order)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (dict(prompt=[999]), 400),
        (dict(prompt="a", max_tokens=999), 400),
        (dict(prompt="a", model="nobody"), 404),
    ],
)
def test_what_is_wrong_from_the_start_is_a_status(inside, worker, body, status):
    answer = inside.complete(**body, stream=True)
    assert answer.status == status and answer.error["message"]


def fail(*_):
    raise RuntimeError("the secret place where it broke")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fails_is_500_and_the_next_one_works(inside, worker, monkeypatch, caplog, stream):
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill_chunks", fail)
        answer = inside.complete(["the", "a"], stream=stream)
    assert answer.status == 500 and answer.headers["x-request-id"] in answer.error["message"]
    assert "secret" not in answer.text and "secret" in caplog.text
    assert inside.complete("the", stream=stream).status == 200


def test_an_error_in_the_middle_ends_the_stream(inside, worker, monkeypatch):
    async def scene():
        async def first(_):
            monkeypatch.setattr(ModelRunner, "decode", fail)

        return await inside.exchange(
            "/v1/completions", dict(prompt="the", max_tokens=200, stream=True, **FOREVER), on_body=first
        )

    *said, last = inside.runner.run(scene()).chunks
    monkeypatch.undo()
    assert said and set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error" and "secret" not in last["error"]["message"]
    assert inside.complete("the", stream=True).chunks


# --- readers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[5] * 200, [[i] * 30 for i in range(5, 25)]], ids=["one", "many"])
@pytest.mark.parametrize("where", ["prefill_chunks", "decode"])
def test_a_client_that_goes_away_is_gone_within_a_step(inside, worker, monkeypatch, where, prompt, stream):
    """In the prompt, of which a step reads 32 tokens, or while the answer is written."""
    gate = Gate(monkeypatch, where)

    async def scene():
        leave = asyncio.Event()
        body = dict(prompt=prompt, max_tokens=50, stream=stream, **FOREVER)
        task = asyncio.create_task(inside.exchange("/v1/completions", body, leave=leave))
        gate.let(2)
        await until(lambda: gate.n_asked == 3)
        leave.set()
        answer = await task
        gate.let(4)  # prompts that the step may still have to read
        await until(lambda: not worker.busy)
        return answer

    answer = inside.runner.run(scene())
    assert gate.n_asked <= (3 if where == "decode" or isinstance(prompt[0], int) else 4)
    assert "DONE" not in answer.text and (stream or answer.status == 499)


def test_one_that_goes_away_while_it_waits_in_line(inside, worker, monkeypatch):
    gate = Gate(monkeypatch, "decode")

    async def scene():
        leave, leave_too = asyncio.Event(), asyncio.Event()
        body = dict(prompt="the", n=3, max_tokens=250, **FOREVER)
        running = asyncio.create_task(inside.exchange("/v1/completions", body, leave=leave))
        await until(lambda: gate.n_asked)
        waiting = asyncio.create_task(inside.exchange("/v1/completions", body, leave=leave_too))
        await until(lambda: worker.n_waiting)
        leave_too.set()
        assert (await waiting).status == 499
        gate.let(1)
        await until(lambda: gate.n_asked == 2 and not worker.n_waiting)
        assert worker.n_running == 1 and not running.done()
        leave.set()
        await running
        gate.let(1)

    inside.runner.run(scene())


def test_a_slow_reader_keeps_only_itself_waiting(inside, worker):
    """It is read to by the message, each with all that came meanwhile."""

    async def scene():
        reads = asyncio.Event()

        async def read(_):
            await reads.wait()

        body = dict(prompt="the", max_tokens=100, stream=True, **FOREVER)
        slow = asyncio.create_task(inside.exchange("/v1/completions", body, on_body=read))
        await until(lambda: worker.n_running)
        other = await inside.exchange("/v1/completions", body)
        assert len(other.chunks) > 50 and not slow.done()
        await until(lambda: not worker.busy)
        reads.set()
        return await slow

    answer = inside.runner.run(scene())
    assert len(answer.messages) <= 3 and len(answer.chunks) > 50


def test_one_that_does_not_read_and_goes_away_is_noticed(inside, worker, monkeypatch):
    gate = Gate(monkeypatch, "decode")

    async def scene():
        leave, stuck, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def read(_):
            stuck.set()
            await released.wait()

        body = dict(prompt="the", max_tokens=200, stream=True, **FOREVER)
        task = asyncio.create_task(inside.exchange("/v1/completions", body, on_body=read, leave=leave))
        gate.let(5)
        await stuck.wait()
        await until(lambda: gate.n_asked == 6)
        leave.set()
        await asyncio.sleep(0)
        gate.let(1)
        await until(lambda: not worker.busy)
        assert not task.done()
        released.set()
        await task

    inside.runner.run(scene())


def test_a_silence_is_filled_with_comments(inside, worker, monkeypatch):
    """While a long prompt is read."""
    go_on, read = threading.Event(), ModelRunner.prefill_chunks

    def slowly(self, pieces):
        assert go_on.wait(30)
        read(self, pieces)

    monkeypatch.setattr(ModelRunner, "prefill_chunks", slowly)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE", 0.01)

    async def scene():
        async def hear(answer):
            if len(answer.messages) == 2:
                go_on.set()

        body = dict(prompt="the", max_tokens=5, stream=True)
        return await inside.exchange("/v1/completions", body, on_body=hear)

    answer = inside.runner.run(scene())
    assert answer.messages[:2] == [b": keep-alive\n\n"] * 2
    assert answer.chunks[-1]["choices"][0]["finish_reason"]
