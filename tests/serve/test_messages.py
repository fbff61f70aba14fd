"""Anthropic's Messages API: the real `anthropic` client against a real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import heedful
from support.serving import KEY

anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed: pip install anthropic")

ASKED = [{"role": "user", "content": "Where is the cat?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "tool_use", "id": "x", "name": "weather", "input": {"city": "Rome"}}
SAMPLING = {"temperature": 1.5, "seed": 1}
SHORT: dict[str, Any] = {"model": "small", "max_tokens": 9, "extra_body": SAMPLING}  # the client has no field for it


@pytest.fixture(scope="module")
def client(server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def small(folder) -> heedful.Loaded:
    """What the server has, here."""
    return heedful.load(folder)


@pytest.fixture(scope="module")
def said(small) -> Any:
    """What the model of the server answers to some turns."""

    def answer(turns: list[dict[str, str]], **more: Any) -> str:
        (result,) = small.complete(turns, chat=True, max_tokens=9, **SAMPLING, **more)
        return result.choices[0].text

    return answer


def test_a_message(client, said):
    found = client.messages.create(system="Be brief.", messages=ASKED, **SHORT)
    (block,) = found.content
    assert block.type == "text" and block.text == said([SYSTEM, *ASKED])
    assert found.id.startswith("msg_") and found.type == "message" and found.role == "assistant"
    assert found.model == "small" and found._request_id.startswith("req_")
    assert found.stop_reason == "max_tokens" and found.stop_sequence is None
    assert found.usage.output_tokens == 9 and found.usage.input_tokens > 10


def test_blocks(client, said):
    blocks = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the cat?"}]
    given = [{"role": "user", "content": blocks}]
    found = client.messages.create(system=[{"type": "text", "text": "Be brief."}], messages=given, **SHORT)
    assert found.content[0].text == said([SYSTEM, *ASKED])
    found = client.messages.create(messages=[SYSTEM, *given], **SHORT)
    assert found.content[0].text == said([SYSTEM, *ASKED])


def test_the_last_message_of_the_assistant_is_continued(client, said):
    begun = [*ASKED, {"role": "assistant", "content": "the cat is"}]
    found = client.messages.create(messages=begun, **SHORT)
    assert found.content[0].text == said(begun, continue_final_message=True)


def test_a_stop_sequence_is_named(client, said):
    whole = said([SYSTEM, *ASKED])
    stop = max((whole[i : i + 2] for i in range(len(whole) - 1)), key=whole.index)
    asked = {"system": "Be brief.", "messages": ASKED, "stop_sequences": ["no such text", stop], **SHORT}
    found = client.messages.create(**asked)
    assert found.content[0].text == whole.partition(stop)[0]
    assert found.stop_reason == "stop_sequence" and found.stop_sequence == stop
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == found.content[0].text and final.stop_sequence == stop
    assert client.messages.create(**{**asked, "stop_sequences": [whole[:1]]}).content == []


def test_a_stream(client, said):
    with client.messages.stream(system="Be brief.", messages=ASKED, **SHORT) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == said([SYSTEM, *ASKED]) and len(pieces) > 3
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 9
    events = [event.type for event in client.messages.create(messages=ASKED, stream=True, **SHORT)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


def test_tokens_are_counted(client):
    asked = {"model": "small", "system": "Be brief.", "messages": ASKED}
    n = client.messages.count_tokens(**asked).input_tokens
    assert n == client.messages.create(max_tokens=1, **asked).usage.input_tokens
    long = [{"role": "user", "content": "word " * 900}]
    assert client.messages.count_tokens(model="small", messages=long).input_tokens > 1024  # more than the context


def test_errors_are_the_clients_exceptions(client, server, locked):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**SHORT, "model": "nobody"}, messages=ASKED)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(messages=[{"role": "user", "content": "word " * 900}], **SHORT)
    with pytest.raises(anthropic.BadRequestError, match="no chat template"):
        client.messages.create(**{**SHORT, "model": "tiny"}, messages=ASKED)
    other = anthropic.Anthropic(base_url=locked.url, api_key="sk-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="key is not right"):
        other.messages.create(messages=ASKED, **SHORT)
    for known in ({"api_key": KEY}, {"auth_token": KEY}):
        other = anthropic.Anthropic(base_url=locked.url, max_retries=0, **known)
        with pytest.raises(anthropic.NotFoundError, match="small"):
            other.messages.create(messages=ASKED, **SHORT)
    assert server.post("/v1/messages/x", {}).json()["type"] == "error"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 70_000}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "the user"),
        ({"messages": [{"role": "assistant", "content": [CALL]}]}, "tool_result"),
        ({"messages": []}, "messages"),
        ({"system": 5}, "system"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(server, more, word):
    reply = server.post("/v1/messages", {"model": "small", "max_tokens": 5, "messages": ASKED, **more})
    body = reply.json()
    assert reply.status_code == 400 and body["type"] == "error", reply.text
    assert body["error"]["type"] == "invalid_request_error" and word in body["error"]["message"]


# --- tools ------------------------------------------------------------------------------------------------------------

WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
CALLED: dict[str, Any] = {
    "model": "small", "max_tokens": 200, "messages": ASKED, "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}  # fmt: skip


def test_a_tool_is_used(client):
    found = client.messages.create(**CALLED)
    (call,) = found.content
    assert call.type == "tool_use" and call.name == "weather" and call.input["city"] in ("Paris", "Rome")
    assert found.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-3 degrees"}]}
    turns = [*ASKED, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    later = client.messages.create(model="small", max_tokens=5, messages=turns, tools=[WEATHER])
    assert later.usage.input_tokens > found.usage.input_tokens
    counted = client.messages.count_tokens(model="small", messages=turns, tools=[WEATHER])
    assert counted.input_tokens == later.usage.input_tokens


def test_the_use_of_a_tool_streams(client):
    choice = {"tool_choice": {"type": "tool", "name": "weather"}}
    with client.messages.stream(**{**CALLED, **choice}) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = final.content
    assert json.loads("".join(pieces)) == call.input and call.input["city"] in ("Paris", "Rome")
    assert final.stop_reason == "tool_use" and len(pieces) > 1


class Report(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


def test_an_answer_of_a_schema(client):
    asked = {"model": "small", "max_tokens": 200, "messages": ASKED, "output_format": Report}
    assert isinstance(client.messages.parse(**asked).parsed_output, Report)
    with client.messages.stream(**asked) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Report)
