"""Requests made up from our own /openapi.json: none fails the server, and every answer is what the schema says."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CASES = 120
FEW = 40  # cases where the fields are those of other operations
OPERATIONS = [
    "POST /v1/completions",
    "POST /v1/engines/{engine}/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "GET /v1/responses/{id}/input_items",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "GET /v1/models",
    "GET /v1/models/{id}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
    "GET /health",
    "GET /metrics",
]
TOOLS = "POST /v1/chat/completions with tools"
CHAT_WITH_TOOLS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "stream",
    "logprobs",
    "n",
)
MODELS = {"/v1/embeddings": "bert-books"}  # elsewhere "small"
LENGTHS = {"/v1/responses": "max_output_tokens"}  # elsewhere max_tokens
PARTS = {
    "StreamOptions", "Message", "InputItem", "TextPart", "TextConfig", "TextFormat", "FlatFunctionTool",
    "FlatToolChoice", "TextBlock", "ContentBlock", "AnthropicMessage", "AnthropicTool", "AnthropicToolChoice",
    "OutputConfig", "OutputFormat",
}  # of requests  # fmt: skip


@pytest.fixture(scope="module")
def described(server) -> dict[str, Any]:
    found = server.get("/openapi.json").json()
    for name, part in found["components"]["schemas"].items():
        if name in PARTS or (name.endswith("Request") and name != "DetokenizeRequest"):
            part["additionalProperties"] = False  # to make up unknown fields everywhere would take most of the time
    return found


@pytest.fixture(scope="module")
def schema(server, described) -> Any:
    found = schemathesis.openapi.from_dict(described)
    found.config.update(base_url=server.url)
    return found


@pytest.fixture(scope="module")
def with_tools(server, described) -> Any:
    """Chats that have one or two tools: among all fields they would rarely be there."""
    changed = copy.deepcopy(described)
    chat = changed["components"]["schemas"]["ChatRequest"]
    chat["properties"] = {name: chat["properties"][name] for name in CHAT_WITH_TOOLS}
    chat["properties"]["tools"] = chat["properties"]["tools"]["anyOf"][0] | {"minItems": 1, "maxItems": 2}
    chat["required"] = ["messages", "tools"]
    found = schemathesis.openapi.from_dict(changed)
    found.config.update(base_url=server.url)
    return found


def sensible(case: Any, draw: random.Random, stored: str) -> None:
    """Most cases name a model that is served (else all would be answered 404), and ask for short answers."""
    if draw.random() > 0.8:
        return
    model = MODELS.get(case.path, "small")
    if isinstance(case.body, dict):
        case.body.pop("engine", None)
        case.body["model"] = model
        for message in case.body["messages"] if "chat" in case.path else ():
            if message["role"] != "assistant":
                message.pop("tool_calls", None)
            if message["role"] == "tool":
                message["tool_call_id"] = "call_1"
        if case.path.endswith(("completions", "responses", "messages")):
            case.body.pop("max_completion_tokens", None)
            case.body[LENGTHS.get(case.path, "max_tokens")] = 4
            if draw.random() < 0.5:
                for name in ("n", "best_of", "logit_bias", "previous_response_id", "tools", "tool_choice"):
                    case.body.pop(name, None)
    for place in (case.path_parameters, case.query):
        for name in {"engine", "id", "model"} & set(place or {}):
            place[name] = stored if "responses" in case.path else model


def test_every_operation_is_listed_here(schema):
    """Those of the playground are in test_playground_schema.py."""
    paths = schema.raw_schema["paths"].items()
    listed = [f"{method.upper()} {path}" for path, item in paths for method in item if not path.startswith("/api/")]
    assert sorted(listed) == sorted(OPERATIONS)


@pytest.mark.parametrize("operation", [*OPERATIONS, TOOLS])
def test_answers_are_as_described(schema, with_tools, server, operation):
    method, path = operation.removesuffix(" with tools").split()
    found, draw, statuses = (with_tools if operation == TOOLS else schema)[path][method], random.Random(1), []
    cases = FEW if operation == TOOLS or path.startswith(("/v1/responses", "/v1/messages")) else CASES
    stored = server.post("/v1/responses", {"model": "small", "input": "a", "max_output_tokens": 1}).json()["id"]

    @seeded(1)
    @settings(
        max_examples=cases if found.body or found.path_parameters or found.query else 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=found.as_strategy())
    def ask(case):
        sensible(case, draw, stored)
        response = case.call(timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    assert 200 in statuses  # the cases reach further than the first check
