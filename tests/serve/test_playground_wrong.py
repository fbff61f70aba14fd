"""Whatever is sent to the playground's API, the answer is right or says what is wrong; the server never fails."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import ThreadServer, assert_error, serving

IMAGE = [[0.5] * 8] * 8
GOOD: dict[str, dict[str, Any]] = {
    "tokens": {"model": "tiny", "text": "To be"},
    "next": {"model": "tiny", "text": "To be", "top_k": 3},
    "lens": {"model": "tiny", "text": "To be", "k": 2},
    "fill": {"model": "tiny", "texts": ["he is a _"], "n": 5},
    "fill/token": {"model": "tiny", "text": "To be", "index": 2},
    "bias": {
        "model": "tiny",
        "templates": ["{A} is a {B}"],
        "groups": {"he": ["he"], "she": ["she"]},
        "fill": {"B": ["man", "cook"]},
        "whole": True,
        "page": False,
    },
    "attention": {"model": "tiny", "text": "To be", "which": "self", "layer": 0, "masked": [1]},
    "attention/overview": {"model": "tiny", "text": "To be", "which": "self", "masked": []},
    "attention/neuron": {
        "model": "tiny",
        "text": "To be",
        "which": "self",
        "layer": 0,
        "head": 0,
        "index": 1,
    },
    "alignment": {"model": "reversal", "source": "1 2 3", "target": "3 2 1"},
    "rollout": {"model": "tiny", "text": "To be"},
    "steps": {"model": "tiny", "text": "To be"},
    "steps/map": {"model": "tiny", "text": "To be", "token": 1},
    "translate": {"model": "reversal", "text": "1 2 3", "beams": 2},
    "classify": {"model": "tiny", "text": "To be", "second": "or"},
    "neighbours": {"model": "reversal", "text": "1 - 2 + 3", "n": 3, "layer": None},
    "answer": {"model": "tiny", "question": "who?", "passage": "To be"},
    "tag": {"model": "tiny", "text": "To be"},
    "image/classify": {"model": "digits-vit", "image": IMAGE},
    "image/complete": {
        "model": "digits-gpt",
        "image": IMAGE,
        "n_given": 60,
        "temperature": 1,
        "seed": 1,
        "n": 1,
    },
}
ODD: list[Any] = [
    None, True, 0, 1, -1, 1.5, 2**31, 10**30, "", " ", "a", "0", "_", "[", "<unk>", "<script>", "\0", "\ud800", "é日👍",
    [], [None], [1], ["a"], [-1], [10**9], [[]], [[1]], [["a"]], [[0.5] * 8] * 7, [[[0.1, 0.2, 0.3]] * 8] * 8, {},
    "tiny", "reversal", "digits-vit", "digits-gpt", "no-such-model", "../tiny", "/etc/passwd", "self", "cross",
    "x" * 30_000, {"a": 1}, "encoder",
    "1 2 3", "1 " * 600, "17", "-3", "9" * 5000, "1,2", "[a|b] _", "[a|", "_ _",
]  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Iterator[ThreadServer]:
    with serving("tiny", "reversal", "digits-vit", "digits-gpt") as found:
        yield found


def check(page: ThreadServer, path: str, body: Any) -> int:
    raw = json.dumps(body).encode()
    response = page.http.post(f"/api/{path}", content=raw, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert response.status_code in (400, 404), (path, str(body)[:300], response.text)
        message = assert_error(response, response.status_code)
        assert len(message) < 1000, (path, message[:300])
    return response.status_code


@pytest.mark.parametrize("path", GOOD)
def test_one_field_that_is_odd(page, path):
    random.seed(path)
    cannot = ("classify", "answer", "tag")
    assert check(page, path, GOOD[path]) == (400 if path in cannot else 200)
    for field in GOOD[path]:
        for value in random.sample(ODD, 12):
            check(page, path, {**GOOD[path], field: value})
        check(page, path, {name: value for name, value in GOOD[path].items() if name != field})


@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_are_odd(page, path):
    for body in (None, [], "a", 5, {}, [GOOD[path]], {"model": GOOD[path].get("model", "tiny")}):
        assert check(page, path, body) == 400
    assert check(page, path, {**GOOD[path], "more": 1, "user": "x"}) == check(page, path, GOOD[path])
    response = page.http.post(f"/api/{path}", content=b"{", headers={"content-type": "application/json"})
    assert_error(response, 400)
    assert page.get(f"/api/{path}").status_code == 405


@pytest.mark.parametrize("name", ["no-such-model", "../tiny", "/etc/passwd", "tiny\0", "%2e%2e/tiny", ""])
def test_only_served_models_are_looked_at(page, name):
    for path in ("tokens", "attention", "image/classify", "image/complete"):
        body = {**GOOD[path], "model": name}
        assert_error(page.post(f"/api/{path}", body), 404, param="model", code="model_not_found")
    assert_error(page.post("/api/fill", {**GOOD["fill"], "model": name}), 404, code="model_not_found")


def test_what_a_text_says_is_text(page):
    found = page.post("/api/tokens", {"model": "tiny", "text": "<unk>"}).json()["tokens"]
    assert [token["text"] for token in found] == ["<unk>", "u", "n", "k", "<unk>"]  # it has no < and no >
    assert [token["special"] for token in found] == [True, False, False, False, True]
