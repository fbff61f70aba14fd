"""What a request may say: limits, nulls, fields that are refused, and that the JSON schema says the same."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from heedful.serve.errors import from_validation
from heedful.serve.request_schema import ChatRequest, CompletionRequest, EmbeddingRequest

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LECTURE = {
    "engine": "davinci", "prompt": "1.", "temperature": 0.7, "max_tokens": 500, "top_p": 1, "frequency_penalty": 0,
    "presence_penalty": 0, "stop": ["12."],
}  # fmt: skip


CALL = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


def refusal(kind, body):
    """The error that a client gets."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors = caught.value.errors()
    return from_validation([{**error, "loc": ("body", *error["loc"])} for error in errors]).body()["error"]


def test_the_defaults_are_openais():
    request = CompletionRequest()
    assert (request.max_tokens, request.temperature, request.top_p, request.n) == (16, 1, 1, 1)
    assert (request.prompt, request.best_of, request.logprobs, request.seed) == (None, None, None, None)
    assert (request.stop, request.logit_bias, request.stream, request.echo) == ((), {}, False, False)
    chat = ChatRequest(**HELLO)
    assert (chat.max_completion_tokens, chat.logprobs, chat.top_logprobs) == (None, False, None)
    assert EmbeddingRequest(input="x").encoding_format == "float"


def test_the_lectures_call_with_its_old_names():
    request = CompletionRequest.model_validate(LECTURE)
    assert request.model == "davinci" and request.stop == ("12.",) and request.max_tokens == 500


def test_null_is_as_absent_for_every_field():
    for kind, body in ((CompletionRequest, {}), (ChatRequest, HELLO), (EmbeddingRequest, {"input": "x"})):
        nulls = {name: None for name in (*kind.model_fields, *kind.unsupported, "unheard_of")} | body
        assert kind.model_validate(nulls).model_dump() == kind.model_validate(body).model_dump()
    options = {"stream": True, "stream_options": {"include_usage": None}}
    assert CompletionRequest.model_validate(options).include_usage is False


def test_unknown_fields_are_accepted():
    CompletionRequest.model_validate({"prompt": "x", "unheard_of": {"a": [1]}, "metadata": {}, "store": True})
    ChatRequest.model_validate({**HELLO, "parallel_tool_calls": True, "service_tier": "auto", "tools": []})


@pytest.mark.parametrize(
    "prompt", ["", "x", ["x"], ["", "y"], [0], [1, 2], [[1], [2, 3]], ["x"] * 2048, [2**31 - 1], [7] * 5000]
)
def test_prompts_of_every_shape(prompt):
    assert CompletionRequest(prompt=prompt).prompt == prompt
    assert EmbeddingRequest(input=prompt).input == prompt


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (1, "prompt"), (True, "prompt"), ({}, "prompt"), ([], "prompt"), (["x"] * 2049, "prompt"), ([[]], "prompt.0"),
        ([1, "x"], "prompt.1"), (["x", 1], "prompt.1"), ([[1], "x"], "prompt.1"), ([None], "prompt.0"),
        ([1, True], "prompt.1"), ([1, -1], "prompt.1"), ([1.5], "prompt.0"), ([[1], [1, 2.5]], "prompt.1.1"),
        ([10**3000], "prompt.0"), ([1e300], "prompt.0"), ([float("nan")], "prompt.0"),
        ("\ud800", "prompt"), (["x", "\udc00"], "prompt.1"),
    ],
)  # fmt: skip
def test_other_prompts_are_refused_by_their_place(prompt, param):
    error = refusal(CompletionRequest, {"prompt": prompt})
    assert error["param"] == param and param in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("n", [0, 129, -1, 1.5, "1", True, 10**400, [1]], ["1", "128"]),
        ("best_of", [0, 21, "x"], ["1", "20"]),
        ("logprobs", [-1, 6, True, 0.5], ["0", "5"]),
        ("max_tokens", [-1, 2**31, 1e10, 0.5, "16"], ["0", "2147483647"]),
        ("temperature", [-0.1, 2.1, "1", True, float("nan"), float("inf"), 10**400], ["0", "2"]),
        ("top_p", [-0.1, 1.1, float("-inf")], ["0", "1"]),
        ("min_p", [-0.1, 1.1], ["0", "1"]),
        ("top_k", [-2, 1.5, "5", 2**31], ["1", "2147483647"]),
        ("repetition_penalty", [0, -1, 5e-324, 1e300], ["0.01", "100"]),
        ("frequency_penalty", [-2.1, 2.1], ["-2", "2"]),
        ("presence_penalty", [-2.1, 2.1], ["-2", "2"]),
        ("seed", [2**64, -(2**63) - 1, 1.5], ["18446744073709551616", "-9223372036854775808"]),
        ("stop", ["", [""], ["a"] * 5, [1], 1, {"a": 1}, "\ud800"], []),
        ("echo", ["true", 1, 0], []),
        ("stream", ["true", 1], []),
        ("model", [1, ["x"], "\ud800"], []),
    ],
)  # fmt: skip
def test_numbers_out_of_range_name_their_field_and_limit(field, values, words):
    for value in values:
        error = refusal(CompletionRequest, {field: value})
        assert error["param"] == field and error["message"] and error["type"] == "invalid_request_error"
        assert len(error["message"]) < 500
    if words:
        messages = [refusal(CompletionRequest, {field: value})["message"] for value in values]
        assert all(any(word in message for message in messages) for word in words), messages


def test_logit_bias_lists_every_bad_key():
    assert CompletionRequest(logit_bias={"5": 1, "50256": -100.0}).logit_bias == {5: 1.0, 50256: -100.0}
    bad = {"5": 1, "x": 1, "-1": 0, "6": 101, "7": "1", "8": float("nan"), "9": True, "٣": 1}
    message = refusal(CompletionRequest, {"logit_bias": bad})["message"]
    assert all(f"{key!r}: " in message for key in ("x", "-1", "6", "7", "8", "9", "٣")) and "'5'" not in message
    assert refusal(CompletionRequest, {"logit_bias": [1]})["param"] == "logit_bias"
    assert len(refusal(CompletionRequest, {"logit_bias": dict.fromkeys(map(str, range(9999)), 999)})["message"]) < 999


@pytest.mark.parametrize("off", [0, -1, None])
def test_top_k_can_be_switched_off_as_elsewhere(off):
    assert CompletionRequest.model_validate({"top_k": off}).top_k is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"suffix": "the end", "prompt": ["a", "b"]}, "suffix"),
        ({"suffix": "the end", "echo": True}, "suffix"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_does_not_go_together_or_is_not_implemented_is_named(body, param):
    error = refusal(CompletionRequest, {"prompt": "x", **body})
    assert error["param"] == param and param in error["message"]


def test_what_changes_nothing_passes():
    CompletionRequest.model_validate({"suffix": "", "response_format": {"type": "text"}, "min_tokens": 0})
    CompletionRequest.model_validate({"max_tokens": 0, "echo": True})
    CompletionRequest.model_validate({"best_of": 1, "stream": True})


NEUTRAL = {
    # Defaults of other servers, as user interfaces send them with every request.
    "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0, "xtc_threshold": 0.1, "dynatemp_range": 0,
    "tfs_z": 1.0, "top_a": 0, "num_beams": 1, "logits_processors": [], "min_tokens": 0, "skip_special_tokens": True,
    "mirostat": 0, "mirostat_tau": 5.0, "cache_prompt": True, "samplers": None, "priority": 0, "length_penalty": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dry_multiplier", 0.8), ("xtc_probability", 0.5), ("dynatemp_range", 0.3), ("tfs_z", 0.9), ("top_a", 0.2),
        ("num_beams", 4), ("length_penalty", 1.5), ("logits_processors", [{"qualname": "x"}]), ("n_predict", 50),
        ("max_new_tokens", 50), ("do_sample", False), ("allowed_token_ids", [1]), ("stop_sequences", ["x"]),
        ("bad_words", ["x"]), ("prompt_logprobs", 0), ("encoder_repetition_penalty", 3), ("mirostat", 2),
    ],
)  # fmt: skip
def test_a_parameter_of_another_server_is_refused_by_name_where_it_would_change_the_answer(field, value):
    for kind, body in ((CompletionRequest, {"prompt": "x"}), (ChatRequest, HELLO)):
        error = refusal(kind, {**body, field: value})
        assert error["param"] == field and field in error["message"]
        kind.model_validate({**body, **NEUTRAL})


def test_options_of_embeddings_that_are_not_implemented_are_refused_by_name():
    for field, value in {"truncate_prompt_tokens": 8, "add_special_tokens": False, "input_type": "query"}.items():
        assert refusal(EmbeddingRequest, {"input": "x", field: value})["param"] == field


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "\ud800"}}, "chat_template_kwargs"),
        ({"documents": ["x"]}, "documents.0"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools.1.function.name"),
        ({"tools": [tool("a", parameters={"type": "string"})]}, "tools.0.function.parameters.type"),
        ({"tools": [tool("a", parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool("a", description="\ud800")]}, "tools"),
        ({"tools": [tool(f"a{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("a", description="x" * 300_000)]}, "tools"),
        ({"tools": [tool("a", strict="yes")]}, "tools.0.function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": tool("b")}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "\ud800", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "tool", "content": None, "tool_call_id": "x"}]}, "messages.0.content"),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_held_names_the_field(more, param):
    error = refusal(ChatRequest, {**HELLO, **more})
    assert error["param"] == param and param.split(".")[-1] in error["message"]


def test_an_assistants_message_may_have_no_content():
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}):
        chat = ChatRequest.model_validate({"messages": [*HELLO["messages"], message, *HELLO["messages"]]})
        assert chat.turns[1] == {"role": "assistant", "content": ""}


def test_values_for_a_template_are_nested_a_little():
    deep: object = "x"
    for _ in range(500):
        deep = {"a": [deep]}
    error = refusal(ChatRequest, {**HELLO, "chat_template_kwargs": {"x": deep}})
    assert error["param"] == "chat_template_kwargs" and "nested" in error["message"]


def test_text_parts_are_joined_and_others_named():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = ChatRequest.model_validate({"messages": [{"role": "developer", "content": parts}], "max_tokens": 7})
    assert chat.turns == [{"role": "system", "content": "ab"}] and chat.max_completion_tokens == 7
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    error = refusal(ChatRequest, {"messages": [{"role": "user", "content": [parts[0], image]}]})
    assert "image_url" in error["message"] and error["param"] == "messages.0.content"


def test_a_whole_number_may_be_written_as_a_float():
    request = CompletionRequest(n=2.0, seed=1e3, top_k=0.0, prompt=[[1, 2.0]])
    assert (request.n, request.seed, request.top_k, request.prompt) == (2, 1000, None, [[1, 2]])
    assert all(type(token) is int for token in request.prompt[0]) and type(request.n) is int


def test_the_json_schema_has_the_limits_and_the_nulls():
    schema = CompletionRequest.model_json_schema()["properties"]
    assert schema["n"] == {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": 128}, {"type": "null"}], "default": 1, "title": "N",
    }  # fmt: skip
    assert all({"type": "null"} in field.get("anyOf", ()) or None in field["enum"] for field in schema.values())
    assert schema["num_beams"]["enum"] == [None, 1]
    assert "messages" in ChatRequest.model_json_schema()["required"]


def test_half_a_character_has_one_message_in_every_field():
    for body in (
        {"messages": [{"role": "\ud800", "content": "a"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ):
        assert "has half of a surrogate pair" in refusal(ChatRequest, body)["message"]
    assert len(refusal(CompletionRequest, {"logit_bias": {"9" * 5000: 1}})["message"]) < 200
