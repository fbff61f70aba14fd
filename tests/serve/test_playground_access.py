"""What runs code, trains or writes asks for the token of the address that `heedful serve` printed; the rest not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from heedful.serve.app import create_app
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.serve.playground import lesson_process, training
from support.sample_lesson import CHILD, lessons_in
from support.serving import PATIENCE, ThreadServer, assert_error, serving

ANSWER = {"exercise": "doubled_in_tests", "source": "def doubled_in_tests(x):\n    return 2 * x\n"}
GUARDED = {
    "/api/lessons/sample/run": {},
    "/api/lessons/sample/check": ANSWER,
    "/api/train": {"text": "the whale rose out of the sea. " * 100},
    "/api/train/stop": {},
}
FORWARDED = [
    *("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Server"),
    *("X-Forwarded", "X-Forwarded-Anything", "X-Real-IP", "True-Client-IP", "CF-Connecting-IP", "CF-Ray", "CF-Visitor"),
    *("X-Original-Forwarded-For", "X-Client-IP", "X-Cluster-Client-IP", "X-Envoy-External-Address", "CDN-Loop"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work") / "runs"


@pytest.fixture(scope="module")
def page(tmp_path_factory, root) -> Iterator[ThreadServer]:
    """The sample lesson, and nothing that a test could start: both commands end at once."""
    with pytest.MonkeyPatch.context() as patch, lessons_in(tmp_path_factory.mktemp("lessons")):
        patch.setenv("XDG_CACHE_HOME", str(root.parent / "cache"))
        patch.setattr(lesson_process, "COMMAND", (sys.executable, "-c", CHILD))
        patch.setattr(training, "COMMAND", (sys.executable, "-S", "-c", ""))
        with serving("tiny", runs=str(root)) as found:
            yield found


@pytest.fixture(scope="module")
def stranger(page) -> Iterator[httpx.Client]:
    """A client that knows the port and not the token."""
    with httpx.Client(base_url=page.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


def test_every_route_is_guarded_or_known_to_need_no_guard():
    """A new route that runs code, trains or writes is added to GUARDED, another to PLAIN."""
    options = Options(models=("tiny",))
    app = create_app(ModelManager(options.models, options, Metrics()), options)
    changing = {path for path, methods in app.openapi()["paths"].items() if set(methods) - {"get", "head"}}
    guarded = {path.replace("/sample/", "/{name}/") for path in GUARDED}
    inference = {path for path in changing if path.startswith(("/v1/", "/api/attention", "/api/image/", "/api/steps"))}
    asking = {"tokens", "next", "lens", "fill", "fill/token", "bias", "alignment", "rollout", "translate", "classify"}
    asking |= {"answer", "tag", "neighbours", "chat/prompt"}
    assert changing == guarded | inference | {f"/api/{name}" for name in asking} | {"/tokenize", "/detokenize"}


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("token", [None, "", "x", "ünï"])
def test_the_token_is_asked_for(stranger, root, path, token):
    headers = {} if token is None else {"x-heedful-token": token.encode("utf-8")}
    said = assert_error(stranger.post(path, json=GUARDED[path], headers=headers), 403, code="token_required")
    assert "open the address that `heedful serve` printed" in said
    assert not root.exists()


@pytest.mark.parametrize("path", GUARDED)
def test_what_came_through_a_proxy_is_refused_even_with_it(page, root, path):
    for name in FORWARDED:
        for header in (name, name.lower(), name.upper()):
            refused = page.http.post(path, json=GUARDED[path], headers={header: "x"})
            assert_error(refused, 403, code="forwarded")
    assert not root.exists()


def test_flags_for_others_do_not_open_a_proxy_nor_replace_the_token(tmp_path):
    options = {"host": "0.0.0.0", "api_keys": ("k",), "exercises": True, "allow_training": True}
    with lessons_in(tmp_path), serving("tiny", runs=str(tmp_path / "runs"), **options) as public:
        key = {"authorization": "Bearer k", "host": "example.org"}
        for path, body in GUARDED.items():
            refused = public.http.post(path, json=body, headers=key | {"x-forwarded-for": "10.0.0.1"})
            assert_error(refused, 403, code="forwarded")
            refused = public.http.post(path, json=body, headers=key | {"x-heedful-token": "another"})
            assert_error(refused, 403, code="token_required")
        assert public.http.post("/api/train/stop", json={}, headers=key).status_code == 200


def test_another_name_of_this_machine_is_not_the_machine_itself(tmp_path):
    """With a key any Host is served; code and training are not."""
    with serving("tiny", runs=str(tmp_path / "runs"), api_keys=("k",)) as found:
        key = {"authorization": "Bearer k", "host": "evil.example"}
        assert_error(found.http.post("/api/train/stop", json={}, headers=key), 403, code="not_local")


def test_the_page_learns_why(stranger, page):
    for client, allowed in (stranger, False), (page, True):
        listed, training = client.get("/api/lessons").json(), client.get("/api/runs").json()["training"]
        assert (listed["exercises"], training["allowed"]) == (allowed, allowed)
        for reason in listed["reason"], training["reason"]:
            assert bool(reason) is not allowed and ("heedful serve` printed" in reason) is not allowed


def test_reading_and_inference_need_no_token(stranger):
    assert stranger.get("/").status_code == 200
    assert stranger.get("/api/lessons/sample").status_code == 200
    body = {"model": "tiny", "prompt": "the", "max_tokens": 1}
    via = {"x-forwarded-for": "10.0.0.1"}
    assert stranger.post("/v1/completions", json=body, headers=via).status_code == 200
    assert stranger.post("/api/next", json={"model": "tiny", "text": "the"}).status_code == 200


def test_what_cells_showed_before_is_for_everybody(page, stranger):
    """Only running them asks for the token."""
    assert_error(stranger.post("/api/lessons/sample/run"), 403, code="token_required")
    shown = page.post("/api/lessons/sample/run")
    assert shown.status_code == 200 and "hello from the cell" in shown.text
    assert stranger.post("/api/lessons/sample/run").text == shown.text
    assert page.post("/api/lessons/sample/check", ANSWER).json()["right"]
