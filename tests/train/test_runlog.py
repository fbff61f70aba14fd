"""What a training says and writes, and that a resumed one says the same."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from heedful.train.loss_plot import smooth
from heedful.train.recipe import LogSettings
from heedful.train.runlog import RunLog


def opened(folder: Path | None, **more) -> RunLog:
    return RunLog(folder, **{"steps": 40, "settings": LogSettings(), "bytes_per_token": 2.0, **more})


def some_steps(log: RunLog, begin: int, end: int) -> None:
    for step in range(begin + 1, end + 1):
        log.step(step, 4 / step, lr=0.1, norm=1.0, tokens=100, seconds=0.5, metrics={"accuracy": step / 100})
        if step % 10 == 0:
            log.validation(step, 5 / step, {"accuracy": 0.5})
            log.sample(step, f"text of {step}\n")


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# --- the log ---------------------------------------------------------------------------------------------------------


def test_a_line_for_each_step_and_evaluation(tmp_path, capsys):
    log = opened(tmp_path)
    some_steps(log, 0, 10)
    log.note("a thing happened")
    log.flush()
    found = lines(tmp_path)
    assert [line["step"] for line in found if line["kind"] == "step"] == list(range(1, 11))
    assert found[1] == {
        "kind": "step", "step": 2, "accuracy": 0.02, "loss": 2.0, "lr": 0.1, "norm": 1.0, "tokens": 100,
        "seconds": 0.5,
    }  # fmt: skip
    validation = found[10]
    assert validation["perplexity"] == math.exp(0.5)
    assert validation["bits_per_byte"] == 0.5 / math.log(2) / 2
    assert validation["accuracy"] == 0.5 and validation["kind"] == "validation"
    assert found[11] == {"kind": "note", "step": 10, "text": "a thing happened"}
    assert (tmp_path / "samples/step-0000010.txt").read_text() == "text of 10\n"
    said = capsys.readouterr().err
    assert "validation loss 0.5000, perplexity 1.649, bits per byte 0.3607, accuracy 0.5" in said
    assert "a thing happened" in said and "text of 10" in said


def test_what_is_no_number_is_null(tmp_path):
    with opened(tmp_path, quiet=True) as log:
        log.step(1, math.nan, lr=0.1, norm=math.inf, tokens=1, seconds=0.1)
        log.step(2, 3.0, lr=0.1, norm=1.0, tokens=1, seconds=0.1)
        log.validation(2, 1000.0)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = [json.loads(x, parse_constant=refuse) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert found[0]["loss"] is None and found[0]["norm"] is None
    assert found[2]["perplexity"] is None and found[2]["loss"] == 1000
    again = opened(tmp_path, begin=2, quiet=True)
    assert math.isnan(again.history.losses[0]) and again.history.losses[1] == 3


def test_without_a_language_there_is_no_perplexity(tmp_path, capsys):
    with opened(tmp_path, bytes_per_token=None, unit="images") as log:
        some_steps(log, 0, 40)
        log.finish()
    assert "perplexity" not in lines(tmp_path)[10] and "perplexity" not in capsys.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["images"] == 4000


# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_log_is_that_of_an_uninterrupted_run(tmp_path):
    with opened(tmp_path / "whole", quiet=True) as log:
        some_steps(log, 0, 40)
        log.finish()
    with opened(tmp_path / "resumed", quiet=True) as log:
        some_steps(log, 0, 33)
        log.note("killed soon")
    with (tmp_path / "resumed" / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 3')  # the line it was killed in
    with opened(tmp_path / "resumed", quiet=True, begin=20) as log:
        assert sorted(p.name for p in (tmp_path / "resumed/samples").iterdir())[-1] == "step-0000020.txt"
        some_steps(log, 20, 40)
        log.finish()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "whole")
    samples = [{p.name: p.read_text() for p in (tmp_path / w / "samples").iterdir()} for w in ("whole", "resumed")]
    assert samples[0] == samples[1] and len(samples[0]) == 4
    whole, resumed = (json.loads((tmp_path / w / "summary.json").read_text()) for w in ("whole", "resumed"))
    assert whole == resumed and whole["tokens"] == 4000 and whole["best_step"] == 40


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_lines_now_and_then_where_there_is_no_terminal(capsys):
    with opened(None, steps=1000, bytes_per_token=None) as log:
        for step in range(1, 1001):
            log.step(step, 2.0, lr=0.1, norm=1.0, tokens=1000, seconds=0.05, utilisation=0.413)
    said = capsys.readouterr()
    shown = said.err.splitlines()
    assert said.out == "" and len(shown) == 21
    assert shown[0].startswith("step 1/1000  loss 2.0000  20k tokens/s  41% utilisation")
    assert shown[-1].startswith("step 1000/1000  ") and shown[-1].endswith("0:00 left")


def shown_losses(capsys) -> list[float]:
    return [float(line.split()[3]) for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]


def test_the_loss_shown_does_not_lag_behind_a_fall(capsys):
    with opened(None, steps=100) as log:
        for step in range(1, 101):
            log.step(step, 4 - 3 * step / 100, lr=0.1, norm=1.0, tokens=1000, seconds=0.05)
    assert shown_losses(capsys)[-1] == pytest.approx(1.0, abs=0.05)


def test_the_loss_shown_goes_on_after_a_resume(tmp_path, capsys):
    draw = np.random.default_rng(0).normal(2, 0.5, 1001)

    def steps(folder, begin, end):
        with opened(folder, steps=1000, begin=begin) as log:
            for step in range(begin + 1, end + 1):
                log.step(step, float(draw[step]), lr=0.1, norm=1.0, tokens=1000, seconds=0.05)

    steps(tmp_path / "whole", 0, 1000)
    whole = shown_losses(capsys)
    steps(tmp_path / "resumed", 0, 899)
    steps(tmp_path / "resumed", 899, 1000)
    assert shown_losses(capsys)[-3:] == whole[-3:]


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with opened(None, steps=3) as log:
        for step in range(1, 4):
            log.step(step, 2.0, lr=0.1, norm=1.0, tokens=1000, seconds=0.05)
        log.note("[bold]kept as it is[/bold]")
    said = capsys.readouterr().err
    assert "step 3/3" in said and "20k tokens/s" in said and "[bold]kept as it is[/bold]" in said
    assert said.endswith("\x1b[?25h")  # the cursor is back


def test_a_model_does_not_command_the_terminal(tmp_path, capsys):
    text = "red \x1b[31m and a bell \x07 and [red]brackets[/red]"
    with opened(tmp_path) as log:
        log.sample(1, text)
        log.sample(2, "half a character \ud800")
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and "[red]brackets[/red]" in said
    assert (tmp_path / "samples/step-0000001.txt").read_text() == text


def test_quiet_says_nothing(tmp_path, capsys):
    with opened(tmp_path, quiet=True) as log:
        some_steps(log, 0, 40)
        log.note("x")
        log.finish({})
    assert capsys.readouterr() == ("", "")


def test_a_signal_may_speak_while_the_terminal_is_written(capsys, monkeypatch):
    with opened(None) as log:
        assert log._display is not None
        show, said = log._display.console.print, []

        def interrupted(text, **more):
            if not said:
                said.append("once")
                log.note("stopping")  # as a handler does, in the middle of printing
            show(text, **more)

        monkeypatch.setattr(log._display.console, "print", interrupted)
        log.note("first")
    assert capsys.readouterr().err == "first\nstopping\n"


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_summary_says_how_good_where_and_what_next(tmp_path, capsys):
    log = opened(tmp_path / "run", baselines={"uniform": 4.17})
    some_steps(log, 0, 40)
    log.validation(40, 9.0)
    capsys.readouterr()
    log.finish({"reason": "finished", "seconds": 75}, next_commands=["heedful generate RUN"])
    rows = dict(x.strip().split("  ", 1) for x in capsys.readouterr().err.splitlines() if "  " in x.strip())
    rows = {k: v.strip() for k, v in rows.items()}
    assert rows["steps"] == "40 (finished)" and rows["best validation loss"] == "0.1250 at step 40"
    assert rows["perplexity"] == "1.133" and rows["bits per byte"] == "0.0902"
    assert rows["uniform baseline"] == "loss 4.1700" and rows["tokens"] == "4k in 1:15"
    assert rows["tokens/s"] == "200" and rows["model"] == str(tmp_path / "run")
    assert rows["use it"] == "heedful generate RUN"
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["validation_loss"] == 0.125 and saved["reason"] == "finished" and saved["step"] == 40


def test_a_run_without_validation_ends_with_its_training_loss(tmp_path):
    log = opened(tmp_path, quiet=True)
    log.step(1, 2.0, lr=0.1, norm=1.0, tokens=10, seconds=0.0)
    log.finish({"best": math.inf, "where": tmp_path})
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["training_loss"] == 2 and saved["perplexity"] == math.exp(2) and saved["best"] is None
    assert saved["where"] == str(tmp_path) and "tokens_per_second" not in saved


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    from matplotlib.image import imread

    log = opened(tmp_path, quiet=True, baselines={"uniform": 4.17, "unigram": 4.0})
    log.plot()
    assert not (tmp_path / "loss.png").exists()  # nothing to show yet
    some_steps(log, 0, 40)
    log.step(41, math.nan, lr=0.1, norm=math.nan, tokens=1, seconds=0.1)
    log.finish({})
    image = imread(tmp_path / "loss.png")
    assert image.shape[0] > 600 and image.shape[1] > 1000
    accent = np.abs(image[..., :3] - np.array([0xC8, 0x55, 0x3D]) / 255).max(-1) < 0.02
    assert accent.sum() > 500 and not list(tmp_path.glob(".*"))


def test_smoothing_keeps_lines_and_beginnings():
    line = np.linspace(5, 1, 1200)
    assert np.allclose(smooth(line)[:-20], line[:-20]) and abs(smooth(line)[-1] - line[-1]) < 0.05
    assert smooth([3.0]).tolist() == [3.0] and smooth([]).tolist() == []
    noisy = 2 + np.random.default_rng(0).normal(size=6000)
    assert np.abs(smooth(noisy)[3000:] - 2).max() < 0.35


# --- others' programs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"log.{name} needs a package: `pip install {name}`"):
        opened(tmp_path, settings=LogSettings(**{name: True}))
    with pytest.raises(ValueError, match="this training has none"):
        opened(None, settings=LogSettings(**{name: True}))


def test_weights_and_biases_gets_one_run_also_when_resumed(tmp_path, monkeypatch):
    begun, logged, closed = [], [], []

    def init(**given):
        begun.append(given)
        return SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: closed.append(1))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for begin in (0, 20):
        with opened(tmp_path / "run", quiet=True, begin=begin, settings=LogSettings(wandb=True)) as log:
            some_steps(log, begin, begin + 20)
    assert begun[0] == begun[1] and begun[0]["resume"] == "allow" and begun[0]["name"] == "run"
    assert (20, {"validation/loss": 0.25, **log.language_scores(0.25), "accuracy": 0.5}) not in logged
    values = {k: v for step, found in logged if step == 40 for k, v in found.items()}
    assert values["validation/loss"] == 0.125 and values["train/loss"] == 0.1 and values["sample"] == "text of 40\n"
    assert closed == [1, 1]


def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard", reason="reads TensorBoard's own files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with opened(tmp_path, quiet=True, settings=LogSettings(tensorboard=True)) as log:
        some_steps(log, 0, 40)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("validation/loss")] == [10, 20, 30, 40]
    assert events.Scalars("train/loss")[-1].value == pytest.approx(0.1)
