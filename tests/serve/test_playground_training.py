"""A training that is started from the page: one at a time, on this machine alone, inside the runs folder; and that
folder's runs among the served models."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.cli import train as train_command
from heedful.serve.options import Options
from heedful.serve.playground import training
from heedful.train.run import Run
from support.folders import tiny_gpt
from support.playground import validated
from support.serving import PATIENCE, ThreadServer, assert_error, serving, words

# Stands for `heedful train`, which takes seconds to import: makes the run, and waits to be stopped.
STUB = """
import json, os, pathlib, signal, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
source = json.loads(given["--set"].partition("=")[2])
if source != "sample:text" and "fail" in pathlib.Path(source).read_text():
    sys.exit("heedful: there is nothing to learn")
folder = pathlib.Path(given["--out"])
folder.mkdir(parents=True)
cache = pathlib.Path(os.environ["HEEDFUL_DATA_CACHE"])
cache.mkdir(exist_ok=True)
(cache / "tokens").write_text("x")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / "recipe.toml").write_text("about = " + json.dumps(str(os.getpid())))
sys.stdin.read()
"""
TEXT = "the whale rose out of the sea. " * 100


@pytest.fixture(scope="module", autouse=True)
def stub(tmp_path_factory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("stub") / "stub.py"
    file.write_text(STUB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "COMMAND", (sys.executable, "-S", str(file)))
        yield


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def page(root) -> Iterator[ThreadServer]:
    with serving("tiny", runs=str(root)) as found:
        yield found


def wait_for(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def state(page: ThreadServer) -> dict:
    return validated("GET", "/api/runs", page.get("/api/runs").content)["training"]


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_at_a_time_until_it_is_stopped_and_all_of_it_in_the_runs_folder(page, root, tmp_path):
    assert state(page) | {"recipe": ""} == {
        "allowed": True, "reason": "", "running": None, "error": "", "recipe": "",
        "min_characters": 2000, "max_characters": 2_000_000,
    }  # fmt: skip
    begun = validated("POST", "/api/train", page.post("/api/train", {"text": TEXT, "name": "../Moby Dick"}).content)
    assert begun["running"] == "Moby-Dick-1"
    assert "is being trained" in assert_error(page.post("/api/train", {"text": TEXT}), 409)
    wait_for((root / "Moby-Dick-1" / "recipe.toml").exists)
    assert (root / ".texts" / "Moby-Dick-1.txt").read_text() == TEXT
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    ended = page.post("/api/train/stop", {}).json()
    assert (ended["running"], ended["error"]) == (None, "")
    assert not (root / ".cache").exists()
    assert [run["name"] for run in page.get("/api/runs").json()["runs"]] == ["Moby-Dick-1"]  # .texts is none
    assert page.post("/api/train", {"sample": "text", "name": "Moby Dick"}).json()["running"] == "Moby-Dick-2"


def test_it_ends_with_the_server(root):
    with serving("tiny", runs=str(root)) as page:
        page.post("/api/train", {"text": TEXT})
        recipe = root / "text-1" / "recipe.toml"
        wait_for(lambda: recipe.is_file() and recipe.read_text())
        number = int(recipe.read_text().split('"')[1])
        assert alive(number)
    assert not alive(number)


def test_a_text_has_its_limits_and_a_failure_its_words(page, monkeypatch):
    monkeypatch.setattr(training, "MAX_CHARACTERS", 5000)
    for body, said in (
        ({"text": "short"}, "5 characters, and it takes 2,000"),
        ({"text": "x" * 5001}, "at most 5,000"),
        ({}, "either a text or"),
        ({"text": TEXT, "sample": "text"}, "either a text or"),
    ):
        assert said in assert_error(page.post("/api/train", body), 400, param="text")
    page.post("/api/train", {"text": "fail " * 1000})
    wait_for(lambda: state(page)["error"])
    assert state(page)["error"] == "there is nothing to learn" and state(page)["running"] is None


def test_others_may_not_train_unless_it_is_allowed(root):
    with serving("tiny", runs=str(root), host="0.0.0.0", api_keys=("k",)) as public:
        key = {"authorization": "Bearer k", "host": "127.0.0.1"}
        for path in ("/api/train", "/api/train/stop"):
            refused = public.http.post(path, json={"text": TEXT} if path == "/api/train" else {}, headers=key)
            assert "--allow-training" in assert_error(refused, 403, code="training_not_allowed")
        told = public.http.get("/api/runs", headers=key).json()["training"]
        assert not told["allowed"] and "--allow-training" in told["reason"]
    assert Options(host="0.0.0.0", allow_training=True).may_train and not Options(host="0.0.0.0").may_train
    assert not root.exists()


def test_a_training_stops_when_its_input_ends(monkeypatch):
    sent, told = [], threading.Event()
    pieces = iter([b"x", b""])
    monkeypatch.setattr(train_command.os, "read", lambda *_: next(pieces))
    monkeypatch.setattr(train_command.os, "kill", lambda *given: (sent.append(given), told.set()))
    train_command.stop_on_eof()
    assert told.wait(PATIENCE) and sent == [(os.getpid(), signal.SIGTERM)]


# --- runs among the models --------------------------------------------------------------------------------------------


small_tokenizer = functools.cache(words)


def checkpoint(root: Path, step: int, name: str = "mine-1") -> None:
    tokenizer = small_tokenizer()
    model = tiny_gpt(vocab_size=len(tokenizer), max_len=64)
    folder = root / name
    run = Run.open(folder) if folder.exists() else Run.create(folder, 'about = "a test"\n', {})
    run.save(step, model, tokenizer, {}, {}, best=True, keep=1)


def models(page: ThreadServer) -> dict[str, dict]:
    return {model["id"]: model for model in validated("GET", "/api/models", page.get("/api/models").content)["models"]}


def test_a_run_is_served_by_its_best_checkpoint(page, root):
    assert list(models(page)) == ["tiny"]
    checkpoint(root, 10)
    (root / "empty").mkdir()
    found = models(page)["runs/mine-1"]
    assert (found["run"], found["source"], found["kind"]) == ("mine-1", str(root / "mine-1"), "decoder")
    assert models(page)["tiny"]["run"] is None
    assert page.get("/api/runs").json()["runs"][0]["model"] == "runs/mine-1"
    body = {"model": "runs/mine-1", "prompt": "the", "max_tokens": 2}
    assert page.post("/v1/completions", body).status_code == 200
    assert models(page)["runs/mine-1"]["loaded"]
    checkpoint(root, 20)  # it went on: the next to ask has the new one
    assert not models(page)["runs/mine-1"]["loaded"]
    assert page.app.state.manager.path("runs/mine-1").name == "step-0000020"
    assert page.post("/v1/completions", body).status_code == 200
    assert page.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).json()["model"] == "tiny"  # the only given
    (root / "mine-1").rename(root.parent / "elsewhere")
    assert list(models(page)) == ["tiny"]
    assert_error(page.post("/v1/completions", body), 404)


def test_runs_are_not_served_to_others(root):
    checkpoint(root, 10)
    with serving("tiny", runs=str(root), host="0.0.0.0", api_keys=("k",)) as public:
        found = public.http.get("/api/models", headers={"authorization": "Bearer k"}).json()["models"]
    assert [model["id"] for model in found] == ["tiny"]
