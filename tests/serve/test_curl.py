"""curl, as people try a server for the first time."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from support.serving import KEY, events

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(*arguments: str, check: bool = True) -> bytes:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--noproxy", "*", *arguments], capture_output=True, timeout=60
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


JSON = ("-H", "content-type: application/json")
ASK = {"model": "tiny", "prompt": "To be", "max_tokens": 8, "temperature": 0}


def test_json(server):
    found = json.loads(curl(f"{server.url}/v1/completions", *JSON, "-d", json.dumps(ASK)))
    assert found["choices"][0]["text"] == server.complete(**ASK)["choices"][0]["text"]


def test_without_a_content_type(server):
    """curl -d alone says that the body is a form."""
    found = json.loads(curl(f"{server.url}/v1/completions", "-d", json.dumps(ASK)))
    assert len(found["choices"]) == 1


def test_a_stream(server):
    raw = curl("-N", f"{server.url}/v1/completions", *JSON, "-d", json.dumps({**ASK, "stream": True}))
    said = "".join(event["choices"][0]["text"] for event in events(raw))
    assert said == server.complete(**ASK)["choices"][0]["text"]


def test_the_call_of_the_lectures(server):
    body = dict(
        engine="small", prompt="Ideas:\n1.", temperature=0.7, max_tokens=500, top_p=1, frequency_penalty=0,
        presence_penalty=0, stop=["12."],
    )  # fmt: skip
    found = json.loads(curl(f"{server.url}/v1/completions", *JSON, "-d", json.dumps(body)))
    assert found["object"] == "text_completion" and "12." not in found["choices"][0]["text"]


def test_a_key(locked):
    refused = json.loads(curl(f"{locked.url}/v1/models"))
    assert refused["error"]["code"] == "invalid_api_key" and "Authorization: Bearer" in refused["error"]["message"]
    shown = curl("-i", f"{locked.url}/v1/models").decode()
    assert shown.startswith("HTTP/1.1 401") and "www-authenticate: Bearer" in shown
    found = json.loads(curl(f"{locked.url}/v1/models", "-H", f"authorization: Bearer {KEY}"))
    assert [model["id"] for model in found["data"]] == ["tiny", "bert-books"]


def test_errors(server):
    found = json.loads(curl(f"{server.url}/v1/completions", *JSON, "-d", '{"model": "tiny", "n": 0}'))
    assert found["error"]["param"] == "n"
    found = json.loads(curl(f"{server.url}/v1/completions", *JSON, "-d", "{"))
    assert found["error"]["type"] == "invalid_request_error" and "JSON" in found["error"]["message"]
    shown = curl("-i", f"{server.url}/v2/nothing").decode()
    assert shown.startswith("HTTP/1.1 404") and '"error"' in shown and "x-request-id:" in shown


def test_health_and_metrics(server):
    assert json.loads(curl(f"{server.url}/health")) == {"status": "ok"}
    assert b"heedful_requests_total" in curl(f"{server.url}/metrics")
