"""The playground's part of /openapi.json: every route is described, and every response is as described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from heedful.train.run import Run
from support.playground import TEXTS, response_models, validated
from support.serving import ThreadServer, events, serving

IMAGE = [[0.5, 0.25] * 4] * 8
# A body for every route; those of models with heads that do not ship are in test_playground_do.py, which checks too.
BODIES: dict[str, list[dict[str, Any]]] = {
    "tokens": [{"model": "tiny", "text": "To be"}, {"model": "reversal", "text": "1 2"}],
    "next": [{"model": "tiny", "text": "To be"}, {"model": "translator", "text": "Ein Hund."}],
    "lens": [{"model": "tiny", "text": "To be"}],
    "fill": [
        {"model": "tiny", "texts": ["he is a _", "she is a _"], "n": 5},
        {"model": "bert-books", "template": "[He|She] is a _.", "words": ["man", "cook"]},
    ],
    "fill/token": [{"model": "bert-books", "text": "He was a man.", "index": 2}],
    "bias": [
        {
            "model": "bert-books",
            "templates": ["The {JOB} said that _"],
            "groups": {"he": ["he"], "she": ["she"]},
            "fill": {"JOB": ["nurse", "judge"]},
            "page": True,
        },
        {"model": "tiny", "templates": ["[he|she] is"]},
    ],
    "attention": [{"model": name, "text": text} for name, text in TEXTS.items()],
    "attention/overview": [{"model": "translator", "text": "Ein Hund.", "which": "cross"}],
    "attention/neuron": [{"model": "tiny", "text": "To be", "index": 1}],
    "alignment": [{"model": "reversal", "source": "1 2 3"}, {"model": "translator", "source": "Ein Hund."}],
    "rollout": [{"model": "tiny", "text": "To be"}, {"model": "digits-vit", "image": IMAGE}],
    "steps": [{"model": "tiny", "text": "To be"}],
    "steps/map": [{"model": "tiny", "text": "To be"}, {"model": "shakespeare", "text": "To be", "token": 1}],
    "steps/weights": [{"model": "tiny"}],
    "translate": [{"model": "translator", "text": "Ein Hund."}, {"model": "reversal", "text": "1 2 3"}],
    "neighbours": [{"model": "bert-books", "text": "king - man + woman", "n": 3}],
    "image/classify": [{"model": "digits-vit", "image": IMAGE}],
}
ELSEWHERE = {"classify", "answer", "tag", "chat/prompt", "train", "train/stop"}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[ThreadServer]:
    root = tmp_path_factory.mktemp("work") / "runs"
    Run.create(root / "one", 'about = "a test"\n', {})
    with serving(*TEXTS, "digits-vit", "digits-gpt", runs=str(root)) as found:
        yield found


@pytest.fixture(scope="module")
def schema(page) -> dict[str, Any]:
    return page.get("/openapi.json").json()


def operations(schema: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Those under /api, by method and path."""
    return {
        (method.upper(), path): operation
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
        if path.startswith("/api/")
    }


def test_the_schema_is_openapi_3_1(schema):
    assert schema["openapi"].startswith("3.1")
    problems = [f"{list(e.absolute_path)}: {e.message[:300]}" for e in OpenAPIV31SpecValidator(schema).iter_errors()]
    assert problems == []


def test_every_route_is_described_and_tagged(schema):
    described = operations(schema)
    assert set(described) == set(response_models())
    for operation in described.values():
        assert operation["tags"] == ["playground"] and operation["description"]
        (content,) = (operation["responses"]["200"]["content"][kind]["schema"] for kind in kinds(operation))
        assert content != {}
    assert {tag for path in schema["paths"].values() for o in path.values() for tag in o.get("tags", [])} == {
        "playground"
    }


def kinds(operation: dict[str, Any]) -> list[str]:
    """The media types of JSON or of events."""
    return [kind for kind in operation["responses"]["200"]["content"] if "arrays" not in kind]


@pytest.mark.parametrize("path", BODIES)
def test_responses_are_as_the_models_say(page, path):
    for body in BODIES[path]:
        response = page.post(f"/api/{path}", body)
        assert response.status_code == 200, response.text
        validated("POST", f"/api/{path}", response.content)


@pytest.mark.parametrize("path", ["models", "images", "runs", "runs/one", "lessons"])
def test_responses_to_get_are_as_the_models_say(page, path):
    template = "runs/{name}" if path.startswith("runs/") else path
    assert validated("GET", f"/api/{template}", page.get(f"/api/{path}").content)


def test_the_events_of_a_stream_are_as_the_model_says(page):
    body = {"model": "digits-gpt", "image": IMAGE, "n_given": 60}
    with page.http.stream("POST", "/api/image/complete", json=body) as response:
        found = events(b"".join(response.iter_raw()))
    adapter = response_models()["POST", "/api/image/complete"]
    assert len([adapter.validate_python(event) for event in found]) == 4


def test_no_route_is_forgotten_here():
    tried = {("POST", f"/api/{path}") for path in {*BODIES, *ELSEWHERE, "image/complete"}}
    tried |= {("GET", f"/api/{path}") for path in ("models", "images", "runs", "runs/{name}", "lessons")}
    in_lessons = {("GET", ""), ("POST", "/run"), ("POST", "/check")}  # test_playground_lessons.py
    tried |= {(method, f"/api/lessons/{{name}}{end}") for method, end in in_lessons}
    assert tried == set(response_models())
