"""The trainings of a folder, as the page polls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heedful.serve.playground import runs
from heedful.train.recipe import LogSettings
from heedful.train.run import Run
from heedful.train.runlog import RunLog
from support.playground import validated
from support.serving import ThreadServer, assert_error, serving

RECIPE = 'about = "a test"\n[train]\nsteps = 20\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work") / "runs"


@pytest.fixture(scope="module")
def page(root) -> Iterator[ThreadServer]:
    with serving("tiny", runs=str(root)) as found:
        yield found


def train(folder: Path, first: int, last: int, *, begin: int = 0, end: bool = False) -> RunLog:
    """What a training from step to step leaves in its folder."""
    if not folder.exists():
        Run.create(folder, RECIPE, {})
    baselines = {"uniform": 4.19, "unigram": 3.3}
    log = RunLog(folder, steps=20, settings=LogSettings(), begin=begin, quiet=True, baselines=baselines)
    for step in range(first, last + 1):
        loss = float("nan") if step == 3 else 4 - step / 10
        log.step(step, loss, lr=0.1, norm=1.0, tokens=64, seconds=0.01)
    log.validation(last, 4 - last / 10)
    log.sample(last, f"<script>alert({last})</script>")
    log.finish({"reason": "finished"}) if end else log.close()
    return log


def runs_in(page: ThreadServer) -> dict[str, Any]:
    return validated("GET", "/api/runs", page.get("/api/runs").content)


def run(page: ThreadServer, name_and_query: str) -> dict[str, Any]:
    return validated("GET", "/api/runs/{name}", page.get(f"/api/runs/{name_and_query}").content)


def listed(page: ThreadServer) -> dict[str, dict]:
    return {run["name"]: run for run in runs_in(page)["runs"]}


def test_no_folder_means_no_runs(tmp_path):
    with serving("tiny", runs=str(tmp_path / "none")) as page:
        assert runs_in(page)["runs"] == []
        assert_error(page.get("/api/runs/x"), 404, code="run_not_found")


def test_a_run_is_followed_line_by_line(page, root):
    folder = root / "poems-1"
    train(folder, 1, 5)
    found = run(page, "poems-1")
    assert [line["step"] for line in found["lines"] if line["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert found["lines"][2]["loss"] is None  # it was not a number
    assert found["baselines"] == {"uniform": 4.19, "unigram": 3.3} and found["recipe"] == RECIPE
    assert found["samples"] == [{"step": 5, "text": "<script>alert(5)</script>"}]
    assert not found["restarted"] and not found["more"]
    place = found["next"]
    again = run(page, f"poems-1?after={place}")
    assert again["lines"] == [] and again["next"] == place
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "step", "step": 6, "loss": 3.4}\n{"kind": "step", "st')
    more = run(page, f"poems-1?after={place}")
    assert [line["step"] for line in more["lines"]] == [6]  # the other is not whole yet
    with (folder / "log.jsonl").open("a") as log:
        log.write('ep": 7, "loss": 3.3}\n')
    last = run(page, f"poems-1?after={more['next']}&samples_after=5")
    assert [line["step"] for line in last["lines"]] == [7] and last["samples"] == []
    train(folder, 6, 6, begin=5)  # resumed from its checkpoint: the log was cut
    anew = run(page, f"poems-1?after={last['next'] + 10_000}")
    assert anew["restarted"] and [line["step"] for line in anew["lines"] if line["kind"] == "step"] == list(range(1, 7))


def test_runs_are_listed_with_how_they_stand(page, root):
    train(root / "done", 1, 20, end=True)
    train(root / "broken-off", 1, 8)
    alive = train(root / "alive", 1, 9)
    assert alive.at == 9
    (root / "alive/.lock").write_text(str(os.getpid()))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (root / "broken-off/.lock").write_text(str(gone.pid))
    found = listed(page)
    assert found["done"]["state"] == "finished" and found["done"]["step"] == found["done"]["steps"] == 20
    assert found["alive"]["state"] == "running" and found["alive"]["step"] == 9
    assert found["broken-off"]["state"] == "stopped" and found["broken-off"]["validation"] == pytest.approx(3.2)
    assert found["alive"]["loss"] == pytest.approx(3.1)
    times = [run["updated"] for run in found.values()]
    assert times == sorted(times, reverse=True)
    old = (root / "done/summary.json").stat().st_mtime
    (root / "done/.lock").write_text(str(os.getpid()))
    os.utime(root / "done/.lock", (old + 5, old + 5))  # taken up again
    assert listed(page)["done"]["state"] == "running"


def test_what_is_no_run_or_lies_elsewhere_is_not_shown(page, root):
    train(root / "real", 1, 2)
    outside = root.parent / "outside"
    train(outside, 1, 2)
    (root / "link").symlink_to(outside)
    (root / "not-a-run").mkdir(exist_ok=True)
    (root / "file").write_text("x")
    (root / "real/samples/step-0000009.txt").symlink_to(__file__)
    assert not {"link", "not-a-run", "file"} & set(listed(page))
    for name in (
        "link",
        "not-a-run",
        "file",
        "..",
        "%2e%2e",
        "%2e%2e%2foutside",
        "nothing",
        "a%00b",
        "x" * 300,
        "%ff",
    ):
        assert_error(page.get(f"/api/runs/{name}"), 404)
    assert [sample["step"] for sample in run(page, "real")["samples"]] == [2]
    for after in ("-1", "x", "1e3", "9" * 30):
        assert_error(page.get(f"/api/runs/real?after={after}"), 400)


def test_damaged_files_are_no_failure(page, root):
    folder = root / "damaged"
    train(folder, 1, 2)
    (folder / "recipe.toml").write_bytes(b"\xff\xfe [[[")
    (folder / "summary.json").write_text("[1, 2")
    (folder / "baselines.json").write_text("[]")
    (folder / ".lock").write_text("nobody")
    lines = b'\xff\n[1]\nnull\n{"kind": 5}\n{"step": NaN, "kind": "step"}\n'
    (folder / "log.jsonl").write_bytes(b"[" * 100_000 + b"\n" + lines)
    found = run(page, "damaged")
    assert found["steps"] is None and found["baselines"] == {} and len(found["lines"]) == 2
    assert listed(page)["damaged"]["step"] is None


def test_long_logs_come_in_parts(page, root, monkeypatch):
    train(root / "long", 1, 20)
    monkeypatch.setattr(runs, "MAX_LOG_BYTES", 300)
    monkeypatch.setattr(runs.read_lines, "__defaults__", (300,))
    steps, place, more = [], 0, True
    while more:
        found = run(page, f"long?after={place}")
        steps += [line["step"] for line in found["lines"] if line["kind"] == "step"]
        assert found["next"] > place
        place, more = found["next"], found["more"]
    assert steps == list(range(1, 21)) and place == (root / "long/log.jsonl").stat().st_size


def test_the_lines_are_the_logs(page, root):
    train(root / "same", 1, 4)
    written = [json.loads(line) for line in (root / "same/log.jsonl").read_text().splitlines()]
    assert run(page, "same")["lines"] == written
