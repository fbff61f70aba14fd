"""Lessons over HTTP: what they are, their cells run by the server, answers to exercises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.playground import validated
from support.sample_lesson import lessons_in
from support.serving import ThreadServer, assert_error, serving


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[ThreadServer]:
    with lessons_in(tmp_path_factory.mktemp("lessons")), serving("tiny") as found:
        yield found


def test_the_list_and_a_lesson(page):
    listed = validated("GET", "/api/lessons", page.get("/api/lessons").content)
    (summary,) = listed["lessons"]
    assert summary == {
        "name": "sample", "title": "A sample", "chapter": "Before Transformers", "about": "a lesson of the tests",
        "n_exercises": 1, "models": ["tiny"],
    }  # fmt: skip
    found = validated("GET", "/api/lessons/{name}", page.get("/api/lessons/sample").content)
    assert found.items() >= summary.items() and found["exercises"] == ["doubled_in_tests"]
    kinds = [part["kind"] for part in found["parts"]]
    assert kinds == ["text", "code", "text", "code", "view", "text", "code", "code", "code", "text", "question", "text"]
    assert found["parts"][6]["tags"] == ["exercise"]


@pytest.mark.parametrize("name", ["nothing", "..", "%2e%2e%2flesson", "..%2f..%2f..%2fREADME", "sample.md", "a%00b"])
def test_another_name_is_not_found(page, name):
    assert_error(page.get(f"/api/lessons/{name}"), 404)
