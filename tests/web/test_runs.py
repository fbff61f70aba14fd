"""Runs: trainings of this machine, their curves against the baselines, live, and two side by side."""

from __future__ import annotations

import csv
import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful.cli import main
from support.serving import Server
from support.trainings import write_story


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two real trainings, short ones."""
    folder = tmp_path_factory.mktemp("work")
    text = write_story(folder / "story.txt", 60)
    small = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "data.length": 16}
    short = {"train.batch_size": 4, "train.eval_every": 10, "log.sample_tokens": 12, "train.device": "cpu"}
    for name, more in {
        "one": {"train.steps": 30},
        "two": {"train.steps": 20, "optimizer.lr": 0.003, "optimizer.name": "adamw"},
    }.items():
        settings = [f"--set={key}={value}" for key, value in (small | short | more).items()]
        assert main(["train", text, "--out", str(folder / "runs" / name), "--quiet", *settings]) == 0
    return folder / "runs"


@pytest.fixture(scope="module")
def server(root):
    if not (Path(heedful.__file__).parent / "serve" / "page" / "index.html").is_file():
        pytest.skip("the playground's page is not built: make page")
    with Server("tiny", "--runs", root, "--lazy") as started:
        yield started


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def facts(page: Any, name: str) -> dict[str, str]:
    box = page.locator(".facts").filter(has=page.get_by_role("heading", name=name))
    return dict(zip(box.locator("dt").all_inner_texts(), box.locator("dd").all_inner_texts(), strict=True))


def test_a_run_is_shown_against_its_baselines(open_tab, page, root, server, tmp_path, capsys):
    open_tab("runs", run="one")
    page.get_by_role("img", name="Loss").wait_for()
    baselines = json.loads((root / "one" / "baselines.json").read_text())
    drawn = page.get_by_role("img", name="Loss").locator(".level-name").all_text_contents()
    assert {line.split(" ")[0]: round(float(line.split(" ")[1]), 1) for line in drawn} == {
        name: round(loss, 1) for name, loss in baselines.items()
    }
    said = facts(page, "one")
    best = min(line["loss"] for line in logged(root / "one") if line["kind"] == "validation")
    assert said["step"] == "30 of 30" and abs(float(said["best validation"].split(" ")[0]) - best) < 5e-3
    for name in ("Learning rate", "Tokens per second"):
        assert page.get_by_role("img", name=name).locator("path.curve").count() == 1
    page.get_by_role("img", name="Loss").hover(position={"x": 300, "y": 100})
    page.locator("figcaption .read b").first.wait_for()
    assert page.locator("figcaption .read b").count() == 4  # training, validation, rate, speed: at one place
    sample = sorted((root / "one" / "samples").iterdir())[-1].read_text()
    assert page.locator("pre.sample").inner_text().split() == sample.split()
    page.get_by_text("Recipe of one").click()
    assert "[optimizer]" in page.locator("details pre").inner_text()
    page.get_by_role("button", name="View code").click()
    file = tmp_path / "shown.py"
    file.write_text(page.get_by_role("dialog").locator("pre").inner_text(), encoding="utf-8")
    runpy.run_path(str(file))
    assert capsys.readouterr().out.startswith("finished 30 ")
    page.get_by_role("dialog").get_by_role("tab", name="Command line").click()
    command = shlex.split(page.get_by_role("dialog").locator("pre").inner_text())
    assert command[0] == "tail" and Path(command[-1]) == root / "one" / "log.jsonl"


def test_two_runs_side_by_side_and_the_link_to_them(visit, open_tab, page, root):
    open_tab("runs", run="one")
    page.get_by_role("button", name="Compare with two").click()
    page.get_by_role("radio", name="Tokens").check()
    page.get_by_text("two training").wait_for()
    page.wait_for_function("() => location.hash.includes('beside=two') && location.hash.includes('by=tokens')")
    again = visit()
    again.goto(page.url)
    again.get_by_text("two training").wait_for()
    assert again.locator("pre.sample").count() == 2 and again.locator(".facts").count() == 2
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as found:
        page.get_by_role("menuitem", name="Numbers (CSV)").click()
    rows = list(csv.DictReader(found.value.path().read_text(encoding="utf-8").splitlines()))
    for name in ("one", "two"):
        losses = [row["loss"] for row in rows if row["run"] == name and row["kind"] == "step"]
        assert [float(loss) for loss in losses] == [
            line["loss"] for line in logged(root / name) if line["kind"] == "step"
        ]
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as found:
        page.get_by_role("menuitem", name="Drawing (SVG)").click()
    assert "unigram" in found.value.path().read_text(encoding="utf-8")
    page.get_by_role("button", name="Compare with two").click()  # and it goes again
    page.get_by_text("two training").wait_for(state="detached")


def test_what_a_run_says_appears_by_itself_and_markup_stays_text(open_tab, page, root):
    open_tab("runs", run="two")
    assert facts(page, "two")["step"] == "20 of 20"
    with (root / "two" / "log.jsonl").open("a") as file:
        for step in range(21, 26):
            line = {
                "kind": "step",
                "step": step,
                "loss": 1.5,
                "lr": 0.1,
                "norm": 1.0,
                "tokens": 64,
                "seconds": 0.1,
            }
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"kind": "note", "step": 25, "text": "<img src=x onerror=window.hit=1>"}) + "\n")
    (root / "two" / "samples" / "step-0000025.txt").write_text("<script>window.hit = 1</script>")
    page.locator("dd", has_text="25 of 20").wait_for()
    assert facts(page, "two")["loss"] == "1.5"
    page.locator("pre.sample", has_text="<script>window.hit = 1</script>").wait_for()
    page.get_by_text("Notes of two").click()
    page.get_by_text("<img src=x").wait_for()
    assert page.evaluate("window.hit") is None and page.locator("main img[src=x]").count() == 0


def test_no_runs_and_narrow_screens(visit, open_tab, page, server):
    page.route("**/api/runs", lambda route: route.fulfill(json={"folder": "runs", "runs": []}))
    open_tab("runs")
    page.get_by_text("heedful train tiny").wait_for()
    narrow = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    open_tab("runs", on=narrow, run="one", beside="two", log="true", smooth="nonsense")
    narrow.get_by_role("img", name="Loss").wait_for()
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_runs_model_is_written_with_and_looked_into(open_tab, page, root):
    open_tab("runs", run="one")
    page.get_by_role("button", name="Compare its samples").first.click()
    page.get_by_label("Samples").locator("figcaption", has_text="two").wait_for()
    page.get_by_role("link", name="Look inside").first.wait_for()
    page.get_by_role("link", name="Write with it").first.click()
    page.locator("#panel-write h1").wait_for()
    assert page.get_by_role("combobox", name="Model").input_value() == "runs/one"
    page.get_by_role("button", name="View code").click()
    assert str(root / "one") in page.get_by_role("dialog", name="Code").inner_text()


def test_a_text_is_trained_on_and_the_training_stopped(open_tab, page, problems):
    asked = []
    running = [None]

    def state(route, request):
        body = request.post_data_json if request.method == "POST" else None
        if body is not None:
            asked.append((request.url.rpartition("/api/")[2], body))
            running[0] = "mine-1" if "text" in body else None
        training = {"allowed": True, "reason": "", "running": running[0], "error": "", "recipe": "minute",
                    "min_characters": 2000, "max_characters": 2_000_000}  # fmt: skip
        run = {"name": "mine-1", "state": "running", "step": 80, "steps": 800, "loss": 2.5, "validation": None,
               "updated": 0, "model": None}  # fmt: skip
        runs = {"folder": "runs", "runs": [run] if running[0] else [], "training": training}
        route.fulfill(json=training if body is not None else runs)

    page.route("**/api/train**", state)
    page.route("**/api/runs", state)
    page.route("**/api/runs/mine-1?*", lambda route: route.fulfill(status=404, json={"error": {"message": "not yet"}}))
    open_tab("runs")
    begin = page.get_by_role("button", name="Train on this")
    page.get_by_label("A text to learn from").fill("short")
    page.get_by_text("1,995 characters more are needed").wait_for()
    assert begin.is_disabled()
    page.get_by_label("A text to learn from").fill("the whale " * 300)
    page.get_by_label("Name").fill("mine")
    begin.click()
    page.get_by_text("step 80 of 800").wait_for()
    page.get_by_role("button", name="Stop").click()
    begin.wait_for()
    assert asked == [("train", {"text": "the whale " * 300, "name": "mine"}), ("train/stop", {})]
    problems[:] = [said for said in problems if "404" not in said]
