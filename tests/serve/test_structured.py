"""Structured output over HTTP: with the real openai client, and as other servers' clients ask for it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

from support.serving import assert_error, events

openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
ASK = {
    COMPLETIONS: {"model": "small", "prompt": "the old dog", "max_tokens": 100, "seed": 1},
    CHAT: {"model": "small", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100, "seed": 1},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
GBNF = 'root ::= "<" [a-c]+ ">" | "none"'
# Fields, and what the answer matches.
FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"response_format": FORMAT}, None),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, None),
    ({"guided_json": SCHEMA}, None),
    ({"guided_json": json.dumps(SCHEMA)}, None),
    ({"structured_outputs": {"json": SCHEMA}}, None),
    ({"json_schema": SCHEMA}, None),
    ({"response_format": {"type": "regex", "regex": "[a-f]{3}"}}, "[a-f]{3}"),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, "<[a-c]+>|none"),
    ({"guided_regex": "[a-f]{3}"}, "[a-f]{3}"),
    ({"regex": "[a-f]{3}"}, "[a-f]{3}"),
    ({"structured_outputs": {"regex": "[a-f]{3}"}}, "[a-f]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
    ({"grammar": GBNF, "logit_bias": {}}, "<[a-c]+>|none"),
    ({"ebnf": GBNF}, "<[a-c]+>|none"),
]  # fmt: skip


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def text_of(response: Any) -> str:
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop", response.text
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "pattern"), FIELDS, ids=lambda value: json.dumps(value)[:40])
def test_every_field_is_followed(server, path, fields, pattern):
    text = text_of(server.post(path, ASK[path] | fields))
    if pattern is None:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_is_the_same_text(server, path):
    body = ASK[path] | {"response_format": FORMAT}
    chunks = events(server.post(path, body | {"stream": True}).content)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)
    assert text == text_of(server.post(path, body)) and choices[-1]["finish_reason"] == "stop"


def test_what_changes_nothing_is_accepted(server):
    plain = server.post(CHAT, ASK[CHAT]).json()["choices"]
    for fields in (
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"json_schema": {}},
        {"structured_outputs": {}},
    ):
        assert server.post(CHAT, ASK[CHAT] | fields).json()["choices"] == plain


def test_an_answer_that_is_cut_says_so(server):
    response = server.post(CHAT, ASK[CHAT] | {"response_format": FORMAT, "max_tokens": 3})
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "type",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"grammar": "root ::= nothing"}, "grammar", "nothing"),
        ({"guided_choice": []}, "guided_choice", "one of several"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "exclude"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not implement"),
        ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex", "exclude each other"),
        ({"regex": "x" * 9000}, "regex", "characters"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_a_400_that_names_it(server, fields, param, problem, stream):
    for path in COMPLETIONS, CHAT:
        assert problem in assert_error(server.post(path, ASK[path] | fields | {"stream": stream}), 400, param=param)


def test_a_vocabulary_that_cannot_is_a_400(server):
    body = {"model": "shakespeare", "prompt": "ROMEO:", "max_tokens": 20}
    message = assert_error(server.post(COMPLETIONS, body | {"guided_json": SCHEMA}), 400, param="guided_json")
    assert "vocabulary" in message
    assert "vocabulary" in assert_error(server.post(COMPLETIONS, body | {"regex": "[a-z]{5}é"}), 400)  # seen later


# --- the real client --------------------------------------------------------------------------------------------------


def test_parse_with_a_pydantic_model(client):
    messages = [{"role": "user", "content": "Who?"}]
    parsed = client.chat.completions.parse(
        model="small", messages=messages, response_format=Person, max_tokens=100, seed=2
    )
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person) and Person.model_validate_json(parsed.choices[0].message.content) == person
    with client.chat.completions.stream(
        model="small", messages=messages, response_format=Person, max_tokens=100, seed=2
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == person
    assert {"content.delta", "content.done"} <= kinds


def test_several_answers_and_log_probabilities(client):
    found = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "Who?"}], n=3, max_tokens=100, logprobs=True,
        response_format={"type": "json_object"}, extra_body={"guided_json": None}, logit_bias={}, temperature=0.7,
        stop=["}"], seed=1,
    )  # fmt: skip
    assert len(found.choices) == 3 and all(choice.message.content.startswith("{") for choice in found.choices)
    for choice in found.choices:
        assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode() == choice.message.content


WRONG = [5, 1.5, True, False, [], [1], {}, {"a": 1}, "", [["a"]]]
RIGHT: dict[str, list[Any]] = {  # what of these a field may be
    "guided_json": [{}, {"a": 1}],
    "json_schema": [{}, {"a": 1}],
    "grammar": [""],
    "structured_outputs": [{}, {"a": 1}],
}
NAMES = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "json_schema", "grammar", "regex", "ebnf",
)  # fmt: skip
THROUGH = {
    **ASK,
    "/v1/responses": {"model": "small", "input": "Who?", "max_output_tokens": 20},
    "/v1/messages": {"model": "small", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 20},
}


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize("path", THROUGH)
def test_a_field_of_another_type_is_refused_by_name(server, path, field):
    for value in WRONG:
        if any(type(value) is type(right) and value == right for right in RIGHT.get(field, ())):
            continue
        response = server.post(path, {**THROUGH[path], field: value})
        assert response.status_code == 400, (field, value, response.text)
        assert field in response.json()["error"]["message"], (field, value)


@pytest.mark.parametrize("fields", [{"guided_choice": ["x"] * 5000}, {"structured_outputs": {"choice": ["x"] * 5000}}])
def test_a_choice_of_very_many_texts_is_refused_with_the_limit(server, fields):
    response = server.post(COMPLETIONS, {**ASK[COMPLETIONS], **fields})
    assert response.status_code == 400 and "4,096" in response.json()["error"]["message"]
