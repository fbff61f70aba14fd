"""The run's folder: what is in it, who may write to it, what resuming refuses, what its name loads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heedful
from heedful.text.train import characters
from heedful.train.recipe import Recipe
from heedful.train.run import Run, to_toml
from support.folders import tiny_gpt

RECIPE = Recipe.from_dict({"model": {"family": "gpt", "n_layers": 2}, "data": {"source": "a.txt"}}).to_dict()
FACTS = {"data": {"train": "1a2b", "validation": "3c4d"}, "versions": {"torch": "2.13"}, "device": "cpu"}


def made(folder: Path) -> Run:
    return Run.create(folder / "run", to_toml(RECIPE), FACTS)


def changed(**tables) -> dict:
    return {k: {**v, **tables.get(k, {})} if isinstance(v, dict) else v for k, v in RECIPE.items()}


def model_of(value: float):
    model = tiny_gpt()
    with torch.no_grad():
        model.embed.weight.fill_(value)
    return model


def save(run: Run, step: int, best: bool = False, **more) -> Path:
    return run.save(step, model_of(step), None, {"x": torch.tensor(step)}, {"step": step}, best, **more)


# --- creating and opening --------------------------------------------------------------------------------------------


def test_a_run_keeps_its_recipe_and_facts(tmp_path):
    made(tmp_path)
    run = Run.open(tmp_path / "run")
    assert Recipe.from_dict(run.recipe) == Recipe.from_dict(RECIPE) and run.facts == FACTS
    assert run.newest(pytest.fail) is None and run.best is None


def test_a_folder_that_holds_something_is_refused(tmp_path):
    made(tmp_path)
    with pytest.raises(ValueError, match="is a run already: go on with `heedful train --resume"):
        made(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds something else \(thesis.txt\)"):
        Run.create(tmp_path / "other", to_toml(RECIPE), FACTS)
    with pytest.raises(ValueError, match="is a file"):
        Run.create(tmp_path / "other" / "thesis.txt", to_toml(RECIPE), FACTS)
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", to_toml(RECIPE), FACTS)


def test_what_is_no_run_is_said(tmp_path):
    made(tmp_path)
    with pytest.raises(ValueError, match=r"no such folder; runs there: .*run"):
        Run.open(tmp_path / "rum")
    with pytest.raises(ValueError, match=r"it has no recipe.toml; runs there: .*run"):
        Run.open(tmp_path)
    (tmp_path / "run" / "facts.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Run.open(tmp_path / "run")


def test_names_count_up(tmp_path):
    assert Run.next_name(tmp_path / "runs", "shakespeare") == tmp_path / "runs" / "shakespeare-1"
    for name in ("shakespeare-1", "shakespeare-10", "shakespeare-x", "other-99"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert Run.next_name(tmp_path / "runs", "shakespeare").name == "shakespeare-11"
    assert Run.next_name(tmp_path / "runs", "../my text").name == "my-text-1"


# --- the same run (robustness 20) ------------------------------------------------------------------------------------


def test_the_same_and_what_is_free_are_accepted(tmp_path):
    run = made(tmp_path)
    run.check_same(RECIPE, FACTS)
    other = changed(train={"steps": 4000, "device": "cuda", "workers": 7}, log={"samples": False})
    run.check_same({**other, "about": "new"}, {**FACTS, "versions": {"torch": "3"}, "device": "cuda"})
    run.rewrite_recipe(to_toml(other))
    assert Run.open(run.folder).recipe["train"]["steps"] == 4000


def test_every_difference_is_shown(tmp_path):
    run = made(tmp_path)
    other = changed(optimizer={"lr": 0.002}, train={"steps": 100}, data={"source": [{"path": "b.txt", "weight": 1.0}]})
    other["model"] = {"family": "gpt", "d_model": 8}
    facts = {**FACTS, "data": {"train": "ffff", "validation": "3c4d"}}
    with pytest.raises(ValueError, match="cannot be resumed") as error:
        run.check_same(other, facts)
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("  ")]
    assert lines == [
        "model.n_layers: 2 -> (not set)",
        'data.source: "a.txt" -> [{path = "b.txt", weight = 1.0}]',
        "train.steps: 2000 -> 100",
        "optimizer.lr: 0.001 -> 0.002",
        "model.d_model: (not set) -> 8",
        'data.train: "1a2b" -> "ffff" (not what it was trained on)',
    ]
    assert "--init-from" in str(error.value)


# --- TOML ------------------------------------------------------------------------------------------------------------

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.dictionaries(keys, values, max_size=4))
def test_toml_is_read_back_as_it_was(data):
    assert tomllib.loads(to_toml(data)) == data


def test_toml_reads_well():
    data = {
        "about": "a run",
        "train": {"steps": 5, "none": None},
        "model": {"rope": {"kind": "x"}},
        "data": {},
    }
    assert to_toml(data) == 'about = "a run"\n\n[train]\nsteps = 5\n\n[model.rope]\nkind = "x"\n\n[data]\n'
    with pytest.raises(TypeError, match="object is no plain data"):
        to_toml({"x": object()})


# --- checkpoints of a run, and what its name loads -------------------------------------------------------------------


def kept(run: Run) -> list[int]:
    return sorted(int(p.name[5:]) for p in run.checkpoints.iterdir())


def value(name: Path) -> float:
    return heedful.load(name).model.embed.weight[0, 0].item()


def test_the_best_and_the_newest_are_kept_and_the_name_loads_the_best(tmp_path):
    run = made(tmp_path)
    with pytest.raises(ValueError, match="without a complete checkpoint"):
        heedful.load(run.folder)
    save(run, 100)
    assert value(run.folder) == 100  # none is marked: the newest
    for step, best in ((200, True), (300, False), (400, False), (500, False)):
        save(run, step, best)
    assert kept(run) == [200, 400, 500]
    again = Run.open(run.folder)
    assert again.best == run.checkpoints / "step-0000200" and value(run.folder) == 200
    assert heedful.load(run.folder).name == "run" and value(run.checkpoints / "step-0000400") == 400
    newest = again.newest(pytest.fail)
    assert newest is not None and newest.step == 500 and newest.best_step == 200
    save(again, 600, best=True, keep=1)
    assert kept(run) == [600] and value(run.folder) == 600


def test_the_tokenizer_stays_with_the_run(tmp_path):
    run = made(tmp_path)
    assert run.tokenizer() is None
    text = "to be or not to be"
    tokenizer = characters([text])
    run.save(1, tiny_gpt(), tokenizer, {}, {}, False)
    for found in (Run.open(run.folder).tokenizer(), heedful.load(run.folder).tokenizer):
        assert found is not None and found.encode(text) == tokenizer.encode(text)
        assert found.decode(found.encode(text)) == text


def test_a_damaged_best_is_not_loaded(tmp_path):
    run = made(tmp_path)
    save(run, 100)
    weights = save(run, 200, best=True) / "model.safetensors"
    save(run, 300)
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"\xff")
    for _ in range(2):  # told every time, which Python's own default is not
        with pytest.warns(UserWarning, match="step-0000200, the best, is damaged .*; using step-0000300 instead"):
            assert value(run.folder) == 300
    weights.write_bytes(good)
    (run.checkpoints / "step-0000200" / "training.safetensors").write_bytes(b"")  # not a part of the model
    assert value(run.folder) == 200


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", None])
def test_the_best_one_is_missed_however_it_was_lost(tmp_path, file):
    """The newest checkpoint, which says which is the best, is the best and damaged or lost itself."""
    run = made(tmp_path)
    save(run, 100, best=True)
    path = save(run, 200, best=True)
    if file is None:
        save(run, 300)
        shutil.rmtree(path)
    else:
        (path / file).write_bytes(b"")
    instead = "step-0000300" if file is None else "step-0000100"
    with pytest.warns(UserWarning, match=f"step-0000200.*; using {instead} instead"):
        assert run.best == run.checkpoints / instead
    save(run, 400, best=True)
    assert value(run.folder) == 400  # a warning would be an error here


@pytest.mark.filterwarnings("always")  # as outside of the tests, where a warning is no error
def test_commands_tell_which_checkpoint_they_use_instead(tmp_path, capsys, monkeypatch):
    from heedful.cli import main

    monkeypatch.chdir(tmp_path)
    run, tokenizer = made(tmp_path), characters(["to be"])
    for step in (100, 200):
        path = run.save(step, model_of(step), tokenizer, {}, {}, step == 200)
    (path / "model.safetensors").write_bytes(b"")
    for command, *more in (["info"], ["generate", "to", "--max-tokens", "1"], ["tokenize", "a"], ["export", "folder"]):
        assert main([command, str(run.folder), *more]) == 0
        said = capsys.readouterr().err
        assert said.count("step-0000200, the best, is damaged") == said.count("\n") == 1, said
        assert said.startswith(f"heedful: warning: {run.folder}") and said.endswith("; using step-0000100 instead\n")


def test_a_resumed_run_remembers_the_best_of_its_own_past(tmp_path):
    run = made(tmp_path)
    save(run, 100, best=True)
    save(run, 200)
    (save(run, 300, best=True) / "training.json").write_text("{}")  # damaged: the run goes on from 200
    told: list[str] = []
    newest = run.newest(told.append)
    assert newest is not None and newest.step == 200 and newest.best_step == 100 and len(told) == 1
    save(run, 250)
    assert (run.newest(told.append) or newest).best_step == 100


def test_commands_take_a_run_for_a_model(tmp_path):
    from heedful.cli import main

    run = made(tmp_path)
    save(run, 1)
    assert main(["info", str(run.folder)]) in (0, None)


# --- one owner -------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from heedful.train.run import Run
run = Run.open(Path(sys.argv[1]))
run.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="runs are locked on POSIX systems")
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    run = made(tmp_path)
    command = [sys.executable, "-c", HOLD, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"being trained by another process .*{other.pid}"):
            run.lock()
        save(run, 1)
        assert value(run.folder) == 1  # reading needs no lock
        other.send_signal(signal.SIGKILL)
    run.lock()
    run.lock()  # it has it already
    with pytest.raises(ValueError, match="being trained"):
        Run.open(run.folder).lock()
    run.unlock()
    Run.open(run.folder).lock()
