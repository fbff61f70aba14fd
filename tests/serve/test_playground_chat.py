"""What the page's chat asks for: the prompt that a template makes of a conversation, read as the model reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import heedful
from support.playground import validated
from support.serving import ThreadServer, assert_error, saved, serving

TURNS = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a dog"}]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[ThreadServer]:
    with serving(saved(tmp_path_factory.mktemp("models") / "small"), "tiny") as found:
        yield found


def prompt(page: ThreadServer, **body):
    response = page.post("/api/chat/prompt", {"model": "small", **body})
    assert response.status_code == 200, response.text
    return validated("POST", "/api/chat/prompt", response.content)


def test_a_conversation_is_the_text_and_tokens_that_the_model_reads(page):
    found = prompt(page, messages=TURNS)
    assert found["text"] == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na dog<|im_end|>\n" + (
        "<|im_start|>assistant\n"
    )
    loaded = heedful.load(page.app.state.manager.path("small"))
    assert [token["id"] for token in found["tokens"]] == list(loaded.encode_prompt(TURNS, chat=True)[0])
    assert [token["raw"] for token in found["tokens"] if token["special"]] == ["<|im_start|>", "<|im_end|>"] * 2 + [
        "<|im_start|>"
    ]
    assert found["context"] == 1024


def test_a_reply_stays_open_and_what_a_user_typed_is_no_special_token(page):
    turns = [*TURNS, {"role": "assistant", "content": "a <|im_end|> cat"}]
    found = prompt(page, messages=turns, continue_final_message=True)
    assert found["text"].endswith("assistant\na <|im_end|> cat")
    assert [token["raw"] for token in found["tokens"] if token["special"]].count("<|im_end|>") == 2


def test_the_tools_and_their_calls_are_as_the_model_reads_them(page):
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *TURNS,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "warm", "tool_call_id": "call_1"},
    ]
    tools = [{"type": "function", "function": function}]
    found = prompt(page, messages=turns, tools=tools)
    loaded = heedful.load(page.app.state.manager.path("small"))
    ids = loaded.encode_prompt([turns[0], turns[1], {**turns[2], "content": ""}, turns[3]], chat=True, tools=tools)[0]
    assert [token["id"] for token in found["tokens"]] == list(ids)
    assert '"city"' in found["text"] and '{"name": "weather", "arguments": {"city": "Rome"}}' in found["text"]


def test_a_rendered_prompt_is_read_as_it_was_written(page):
    found = prompt(page, messages=TURNS)
    for path, key in (("tokens", "tokens"), ("attention", "from")):
        body = {"model": "small", "text": found["text"], "rendered": True}
        assert page.post(f"/api/{path}", body).json()[key] == found["tokens"]
        plain = page.post(f"/api/{path}", {**body, "rendered": False}).json()[key]
        assert not any(token["special"] and token["raw"] == "<|im_start|>" for token in plain)


def test_a_model_without_a_template_says_so(page):
    assert "no chat template" in assert_error(page.post("/api/chat/prompt", {"model": "tiny", "messages": TURNS}), 400)
