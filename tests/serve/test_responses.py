"""OpenAI's Responses API: the real `openai` client against a real server, and the store's limits."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import heedful
from heedful.serve.response_store import ResponseStore, StoredResponse
from support.application import sync_client
from support.serving import assert_error

openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the cat?"}]
SHORT: dict[str, Any] = {"model": "small", "max_output_tokens": 9, "temperature": 1.5, "extra_body": {"seed": 1}}


@pytest.fixture(scope="module")
def client(server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def said(folder) -> Any:
    """What the model of the server answers to some turns."""
    small = heedful.load(folder)

    def answer(turns: list[dict[str, str]]) -> str:
        (result,) = small.complete(turns, chat=True, temperature=1.5, seed=1, max_tokens=9)
        return result.choices[0].text

    return answer


def late(text: str) -> str:
    """Two characters that the text does not have for as long as possible."""
    return max((text[i : i + 2] for i in range(len(text) - 1)), key=text.index)


def stopped(stop: str) -> dict[str, Any]:
    return {**SHORT, "extra_body": {"seed": 1, "stop": stop}}


def test_a_response(client, said):
    found = client.responses.create(input="Where is the cat?", instructions="Be brief.", **SHORT)
    assert found.output_text == said(TURNS)
    assert found.id.startswith("resp_") and found.object == "response" and found._request_id
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    (item,) = found.output
    assert item.type == "message" and item.role == "assistant" and item.status == "incomplete"
    assert found.usage.output_tokens == 9 and found.usage.total_tokens == found.usage.input_tokens + 9
    assert found.temperature == 1.5 and found.instructions == "Be brief." and found.text.format.type == "text"


@pytest.mark.parametrize(
    "given",
    [
        TURNS,
        [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, TURNS[1]],
    ],
)
def test_items(client, said, given):
    assert client.responses.create(input=given, **SHORT).output_text == said(TURNS)


def test_an_answer_that_ends_by_itself(client, said):
    stop = late(said(TURNS))
    found = client.responses.create(input=TURNS, **stopped(stop))
    assert found.output_text == said(TURNS).partition(stop)[0] != ""
    assert found.status == found.output[0].status == "completed" and found.incomplete_details is None


def test_a_stream(client, said):
    events = list(client.responses.create(input=TURNS, stream=True, **SHORT))
    kinds = [event.type for event in events]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    begin, end = kinds.index("response.output_text.delta"), kinds.index("response.output_text.done")
    assert kinds[:begin] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert set(kinds[begin:end]) == {"response.output_text.delta"} and len(pieces) > 3
    assert kinds[end + 1 :] == ["response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(pieces) == events[end].text == events[-1].response.output_text == said(TURNS)
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    again = client.responses.retrieve(events[-1].response.id)
    assert again == events[-1].response and again.usage.output_tokens == 9


def test_the_clients_own_stream(client, said):
    stop = late(said(TURNS))
    with client.responses.stream(input=TURNS, **stopped(stop)) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == final.output_text == said(TURNS).partition(stop)[0] and final.status == "completed"


def test_an_answer_without_text_is_an_empty_message(client, said):
    asked = {**stopped(said(TURNS)[:2]), "input": TURNS}
    (item,) = client.responses.create(**asked).output
    assert item.content[0].text == "" and item.status == "completed"
    with client.responses.stream(**asked) as stream:
        (same,) = stream.get_final_response().output
    assert same.content[0].text == "" and same.status == "completed"


def test_conversations_go_on(client, said):
    first = client.responses.create(input="Where is the cat?", instructions="Be brief.", **SHORT)
    second = client.responses.create(input="And the dog?", previous_response_id=first.id, **SHORT)
    turns = [
        {"role": "user", "content": "Where is the cat?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the dog?"},
    ]
    assert second.output_text == said(turns) and second.previous_response_id == first.id  # without the instructions
    client.responses.delete(first.id)  # the second has all of the conversation
    client.responses.create(input="Why?", previous_response_id=second.id, **SHORT)
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))  # three pages
    assert [item.content[0].text for item in listed] == [turn["content"] for turn in turns]
    assert [item.role for item in client.responses.input_items.list(second.id)] == ["user", "assistant", "user"]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.responses.input_items.list(second.id, after="msg_x")


def test_what_is_not_stored_is_not_found(client):
    kept = client.responses.create(input="a", metadata={"for": "a test"}, **SHORT)
    assert client.responses.retrieve(kept.id) == kept and kept.metadata == {"for": "a test"}
    client.responses.delete(kept.id)
    unkept = client.responses.create(input="a", store=False, **SHORT)
    assert unkept.store is False
    for id in (kept.id, unkept.id, "resp_x"):
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{id}' not found"):
                ask(id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input="b", previous_response_id=id, **SHORT)
        assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_a_long_conversation_is_refused_or_cut(client):
    asked = {"model": "small", "input": "word " * 900, "temperature": 0, "max_output_tokens": 500}
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.responses.create(**asked)
    assert caught.value.param == "input" and caught.value.code == "context_length_exceeded"
    found = client.responses.create(**{**asked, "max_output_tokens": 4}, truncation="auto")
    assert found.truncation == "auto" and found.usage.input_tokens == 1020


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "not a name"}]}, "tools.0.name"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"max_output_tokens": 70_000}, "max_output_tokens"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(server, more, param):
    reply = server.post("/v1/responses", {"model": "small", "input": "a", **more})
    message = assert_error(reply, 400)
    assert reply.json()["error"]["param"].startswith(param) and param.split(".")[-1] in message


# --- tools and structured output --------------------------------------------------------------------------------------

WEATHER = {
    "type": "function", "name": "weather", "description": "The weather in a city", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
CALLED: dict[str, Any] = {"model": "small", "input": "Is it cold?", "tools": [WEATHER], "max_output_tokens": 200}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_a_call(client, choice):
    found = client.responses.create(tool_choice=choice, parallel_tool_calls=False, **CALLED)
    (call,) = found.output
    assert call.type == "function_call" and call.name == "weather" and call.status == found.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert found.tools[0].name == "weather" and found.tool_choice.type == choice["type"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "-3 degrees"}
    by_id = client.responses.create(input=[result], previous_response_id=found.id, **SHORT)
    whole = [{"role": "user", "content": "Is it cold?"}, *found.output, result]
    assert client.responses.create(input=whole, **SHORT).output_text == by_id.output_text
    kinds = [item.type for item in client.responses.input_items.list(by_id.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]


def test_a_call_streams(client):
    with client.responses.stream(tool_choice="required", parallel_tool_calls=False, **CALLED) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    kinds = [event.type for event in events]
    assert kinds[2:4] == ["response.output_item.added", "response.function_call_arguments.delta"]
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and call.parsed_arguments["city"] in ("Paris", "Rome")


class Report(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


def test_an_answer_of_a_schema(client):
    found = client.responses.parse(model="small", input="Is it cold?", text_format=Report, max_output_tokens=200)
    assert isinstance(found.output_parsed, Report) and found.status == "completed"
    assert found.text.format.type == "json_schema" and found.text.format.name == "Report"
    with client.responses.stream(
        model="small", input="Is it cold?", text_format=Report, max_output_tokens=200
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Report)
    wrong = {"format": {"type": "json_schema", "name": "wrong", "schema": {"type": 5}}}
    with pytest.raises(openai.BadRequestError, match="JSON schema") as caught:
        client.responses.create(input="a", text=wrong, **SHORT)
    assert caught.value.param == "text.format"


# --- the store --------------------------------------------------------------------------------------------------------


def test_the_store_forgets_the_least_recently_used():
    store = ResponseStore(max_responses=3, max_bytes=100)
    for id in ("a", "b", "c"):
        store.put(None, id, StoredResponse(b"x" * 10, b"y" * 10))
    assert store.get(None, "a") is not None
    store.put(None, "d", StoredResponse(b"", b""))
    assert store.get(None, "b") is None and len(store) == 3
    store.put(None, "e", StoredResponse(b"x" * 70, b""))
    assert store.get(None, "c") is None and store.n_bytes == 90  # a, e and d
    store.put(None, "f", StoredResponse(b"x" * 101, b""))  # there is never room for it
    assert len(store) == store.n_bytes == 0


def test_a_response_is_for_its_own_key(folder):
    one, two = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("one", "two"))
    with sync_client(str(folder), api_keys=("one", "two")) as ask:
        status, kept = ask("POST", "/v1/responses", json={"input": "a", "max_output_tokens": 1}, **one)
        path, again = f"/v1/responses/{kept['id']}", {"input": "b", "previous_response_id": kept["id"]}
        assert status == 200 and ask("GET", path, **two)[0] == ask("DELETE", path, **two)[0] == 404
        assert ask("POST", "/v1/responses", json=again, **two)[0] == 400
        assert ask("GET", path, **one) == (200, kept) and ask("DELETE", path, **one)[0] == 200
        assert ask("GET", path, **one)[0] == 404
