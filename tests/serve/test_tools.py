"""Tools with the clients that people use: calls that are valid whatever the model prefers, full and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, ConfigDict, Field

import heedful
from heedful.generate.grammar import Grammar
from heedful.loaded import Loaded
from heedful.text import Tokenizer
from heedful.text.tool_calls import parse_calls
from heedful.text.tools import HERMES, call_grammar
from heedful.weights.save import save
from support.folders import tiny_gpt
from support.real import real_model
from support.serving import ThreadServer, assert_error, serving
from support.tool_templates import CHATML, TEMPLATES, TOOLS, conversation, tool, tool_tokenizer

MODELS = {**TEMPLATES, "chatml": CHATML}
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
QUESTION = [{"role": "user", "content": "Is it cold?"}]


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Basel", "Zürich"]
    days: Annotated[int, Field(ge=1, le=9)]


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: tool_tokenizer(template) for name, template in MODELS.items()}


@pytest.fixture(scope="module")
def where(tokenizers, tmp_path_factory) -> Iterator[ThreadServer]:
    """Models of random weights, one for each template."""
    folders = []
    for name, tokenizer in tokenizers.items():
        folders.append(tmp_path_factory.mktemp("models") / name)
        save(tiny_gpt(vocab_size=len(tokenizer), max_len=2048), folders[-1], tokenizer)
    with serving(*folders) as found:
        yield found


@pytest.fixture(scope="module")
def client(where) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{where.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def check_calls(calls: Any) -> None:
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls) > 0


@pytest.mark.parametrize("model", MODELS)
def test_a_random_model_calls_correctly_where_it_must(client, model):
    settings = dict(model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", n=4, seed=1, max_tokens=150)
    reply = client.chat.completions.create(**settings, parallel_tool_calls=False)
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert len(choice.message.tool_calls) == 1
        check_calls(choice.message.tool_calls)


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_is_the_full_answer(client, model):
    settings: dict[str, Any] = dict(model=model, messages=QUESTION, tools=TOOLS, seed=5, max_tokens=150, logprobs=True)
    for choice in ("required", "auto", {"type": "function", "function": {"name": "get_time"}}):
        full = client.chat.completions.create(**settings, tool_choice=choice).choices[0]
        chunks, state = [], ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**settings, tool_choice=choice, stream=True):
            chunks.append(chunk.choices[0].delta)
            state.handle_chunk(chunk)
        joined = state.current_completion_snapshot.choices[0]
        assert joined.message.content == full.message.content and joined.finish_reason == full.finish_reason
        calls = [
            [(c.function.name, c.function.arguments) for c in m.tool_calls or ()]
            for m in (joined.message, full.message)
        ]
        assert calls[0] == calls[1]
        scores = [[entry.logprob for entry in found.logprobs.content] for found in (joined, full)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        parts = [part for delta in chunks for part in delta.tool_calls or ()]
        first = {part.index: part for part in reversed(parts)}
        for index, (name, arguments) in enumerate(calls[1]):
            begin = first[index]
            assert (begin.function.name, begin.function.arguments, begin.type) == (name, "", "function")
            rest = [p for p in parts if p.index == index and p is not begin]
            assert "".join(p.function.arguments for p in rest) == arguments
            assert all(p.id is None and p.function.name is None for p in rest)
        if isinstance(choice, dict):
            assert [name for name, _ in calls[1]] == ["get_time"]


def test_text_before_a_call(client, tokenizers):
    """A model that is inclined to call: `[TOOL_CALLS]` is a special token, which no text has."""
    bias = {str(tokenizers["mistral"].special_tokens["[TOOL_CALLS]"]): 4}
    settings = dict(model="mistral", messages=QUESTION, tools=TOOLS, logit_bias=bias, n=8, seed=1, max_tokens=150)
    reply = client.chat.completions.create(**settings)
    texts = [choice.message.content for choice in reply.choices]
    assert any(texts) and not any("TOOL_CALLS" in (text or "") for text in texts)
    for choice in reply.choices:
        if choice.finish_reason == "tool_calls":
            check_calls(choice.message.tool_calls)
    assert {"tool_calls"} <= {choice.finish_reason for choice in reply.choices}
    none = client.chat.completions.create(**settings, tool_choice="none")
    assert not any(choice.message.tool_calls for choice in none.choices)
    assert none.usage.prompt_tokens < reply.usage.prompt_tokens


def test_several_calls(client, tokenizers):
    """A line break between two calls is likelier than the end."""
    bias = {str(tokenizers["qwen"].id("Ċ")): 3}
    settings = dict(model="qwen", messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=400, n=4, seed=2)
    reply = client.chat.completions.create(**settings, logit_bias=bias)
    numbers = []
    for choice in reply.choices:
        calls = choice.message.tool_calls
        numbers.append(len(calls))
        check_calls(calls if choice.finish_reason == "tool_calls" else calls[:-1])  # the last may be cut
    assert max(numbers) > 1


@pytest.mark.parametrize("model", MODELS)
def test_calls_and_results_reach_the_template(client, tokenizers, model):
    """What the client itself returned goes back to the server."""
    settings: dict[str, Any] = dict(model=model, tools=TOOLS, max_tokens=100, parallel_tool_calls=False)
    answer = client.chat.completions.create(messages=QUESTION, tool_choice="required", **settings).choices[0].message
    (call,) = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 °C"}
    reply = client.chat.completions.create(messages=[*QUESTION, answer, result], **settings)
    said = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    turns = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [said]}, result]
    assert reply.usage.prompt_tokens == len(tokenizers[model].chat(turns, tools=TOOLS))


def test_pydantic_tools_of_openais_client(client):
    reply = client.chat.completions.parse(
        model="chatml", messages=QUESTION, tools=[openai.pydantic_function_tool(Weather)], max_tokens=150,
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    assert isinstance(reply.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_langchain(where, tokenizers):
    pytest.importorskip("langchain_openai", reason="LangChain is not installed: pip install langchain-openai")
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model="qwen", base_url=f"{where.url}/v1", api_key="x", max_retries=0, max_completion_tokens=150)
    bound = llm.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("Is it cold?")
    (call,) = answer.tool_calls
    assert call["name"] == "Weather" and Weather.model_validate(call["args"])
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    whole = AIMessageChunk(content="")
    for piece in bound.stream("Is it cold?"):
        whole += piece
    assert Weather.model_validate(whole.tool_calls[0]["args"])
    talk = [HumanMessage("Is it cold?"), answer, ToolMessage("3 °C", tool_call_id=call["id"])]
    assert llm.bind_tools([Weather]).invoke(talk).usage_metadata["input_tokens"] > 100
    for method in ("function_calling", "json_schema"):
        assert isinstance(llm.with_structured_output(Weather, method=method).invoke("Is it cold?"), Weather)
    # Any object is a valid answer: the shortest.
    closed = llm.model_copy(update={"logit_bias": {tokenizers["qwen"].id("}"): 100}})
    assert isinstance(closed.with_structured_output(Anything, method="json_mode").invoke("As JSON:"), Anything)


def test_instructor(client, tokenizers):
    instructor = pytest.importorskip("instructor", reason="instructor is not installed: pip install instructor")
    settings = dict(model="chatml", messages=QUESTION, max_tokens=200, max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        assert isinstance(patched.chat.completions.create(response_model=Weather, **settings), Weather)
    settings["logit_bias"] = {str(tokenizers["chatml"].id("}")): 100}
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON)
    assert isinstance(patched.chat.completions.create(response_model=Anything, **settings), Anything)


def test_an_answer_without_calls_follows_the_response_format(client, where, tokenizers):
    schema = {"name": "weather", "schema": Weather.model_json_schema()}
    settings: dict[str, Any] = dict(
        model="mistral", messages=QUESTION, tools=TOOLS, n=4, seed=1, max_tokens=150,
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip
    for bias, calls in ((-100, False), (100, True)):
        settings["logit_bias"] = {str(tokenizers["mistral"].special_tokens["[TOOL_CALLS]"]): bias}
        for choice in client.chat.completions.create(**settings).choices:
            assert bool(choice.message.tool_calls) == calls
            assert calls or Weather.model_validate_json(choice.message.content)
    for model, format in (("llama", settings["response_format"]), ("qwen", {"type": "regex", "regex": "a+"})):
        asked = {"model": model, "messages": QUESTION, "tools": TOOLS, "response_format": format}
        assert_error(where.post("/v1/chat/completions", asked), 400, param="response_format")


def test_refusals(where):
    asked = {"model": "chatml", "messages": QUESTION, "max_tokens": 4}
    wrong = [
        {
            "type": "function",
            "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}},
        }
    ]
    message = assert_error(where.post("/v1/chat/completions", {**asked, "tools": wrong}), 400, param="tools")
    assert "not" in message
    wrong[0]["function"]["strict"] = False
    assert where.post("/v1/chat/completions", {**asked, "tools": wrong}).status_code == 200
    old = {**asked, "functions": [TOOLS[0]["function"]]}
    assert_error(where.post("/v1/chat/completions", old), 400, param="functions")


def test_a_real_model_fills_in_what_it_must_call():
    """SmolLM2 never learned this form."""
    loaded = heedful.load(real_model("smollm2-135m-instruct"))
    city = {"type": "string"}
    tools = [tool("get_weather", city=city), tool("get_time", city=city)]
    grammar = call_grammar(HERMES, tools, loaded.tokenizer.special_tokens, required=True, parallel=False)
    settings = {"tools": tools, "grammar": Grammar.lark(grammar), "temperature": 0, "max_tokens": 60}
    (call,) = parse_calls(HERMES, loaded.chat("What time is it in Tokyo?", **settings)).calls
    assert call.name == "get_time" and json.loads(call.arguments) == {"city": "Tokyo"}


def test_a_conversation_in_python(tokenizers):
    tokenizer = tokenizers["qwen"]
    loaded = Loaded(tiny_gpt(vocab_size=len(tokenizer), max_len=2048), tokenizer, "qwen")
    talk = conversation({"city": "Basel", "days": 1})
    ids, _ = loaded.encode_prompt(talk, chat=True, tools=TOOLS)
    assert list(ids) == tokenizer.chat(talk, tools=TOOLS)
    assert loaded.chat(talk, tools=TOOLS, max_tokens=3, temperature=0)
    with pytest.raises(ValueError, match="chat=True"):
        loaded.generate("x", tools=TOOLS)
