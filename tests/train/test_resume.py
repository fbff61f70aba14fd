"""A run that was broken off and goes on is the run that never was: every bit of its weights, state and log."""

import json
import signal

import pytest

import heedful
from heedful.assemble import assemble
from heedful.cli import main
from heedful.train.recipe import Recipe, read
from heedful.training import resume, train
from support.trainings import (
    SMALL,
    assert_same_run,
    changes,
    checkpoint,
    command,
    logged,
    own_cache,
    power_cut,
    steps_of,
    wait_for,
    write_pairs,
    write_story,
)

DROPOUT = {**SMALL, "dropout": 0.2}
GPT = {"family": "gpt", **DROPOUT}
WORDPIECE = {"kind": "wordpiece", "vocab_size": 80}
TRAININGS = {
    "gpt, adamw": {"model": GPT},
    "gpt, a mean of the weights": {"model": GPT, "train": {"ema": 0.9}},
    "gpt, muon, in parts": {"model": GPT, "optimizer": {"name": "muon"}, "train": {"accumulate": 3}},
    "gpt, lion, a mean, in parts": {
        "model": GPT,
        "optimizer": {"name": "lion", "lr": 1e-3},
        "train": {"ema": 0.9, "accumulate": 2},
    },
    "llama without dropout, bfloat16": {
        "model": {"family": "llama", **SMALL},
        "train": {"precision": "bfloat16"},
    },
    "bert, pairs of sentences": {
        "model": {"family": "bert", **DROPOUT},
        "tokenizer": WORDPIECE,
        "objective": {"name": "masked"},
    },
    "t5, spans, adafactor": {
        "model": {"family": "t5", **DROPOUT, "d_head": 8},
        "tokenizer": {"kind": "unigram", "vocab_size": 150},
        "objective": {"name": "spans"},
        "optimizer": {"name": "adafactor"},
    },
    "transformer, pairs of like length": {
        "model": {"family": "transformer", **DROPOUT},
        "data": {"kind": "pairs", "length": 64, "pairs": True},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "objective": {"name": "seq2seq", "smoothing": 0.1},
    },
    "seq2seq, reversal": {
        "model": {"family": "seq2seq", "d_model": 16, "attention": "dot", "dropout": 0.2},
        "data": {"kind": "reversal", "length": 6, "n_examples": 150, "blanked": 0.3},
        "objective": {"name": "seq2seq"},
    },
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = own_cache(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_recipe(folder, **tables):
    """A recipe's file, and the data it reads."""
    settings = changes(**tables)
    kind = settings["data"].get("kind", "text")
    if kind != "reversal":
        write = write_pairs if kind == "pairs" else write_story
        settings["data"]["source"] = write(folder / ("data.tsv" if kind == "pairs" else "data.txt"))
    return settings


def started(folder, settings):
    """The settings as a file, which is how a recipe comes."""
    from heedful.train.run import to_toml

    path = folder / "recipe.toml"
    path.write_text(to_toml(settings))
    return path


@pytest.mark.parametrize("name", TRAININGS)
def test_resumed_is_uninterrupted(here, name):
    recipe = started(here, write_recipe(here, **TRAININGS[name]))
    train(recipe, folder=here / "whole", quiet=True)
    with power_cut(after=13):
        train(recipe, folder=here / "cut", quiet=True)
    assert steps_of(here / "cut") == [10]
    resume(here / "cut", quiet=True)
    assert_same_run(here / "whole", here / "cut", 20)
    assert [line["step"] for line in logged(here / "cut")] == list(range(1, 21))
    n = len(assemble(Recipe.from_dict(read(recipe))).train)
    assert n // 8 < 20 and any(n * epoch // 8 in range(10, 20) for epoch in range(1, 9))  # a border is in it


def test_a_run_that_died_before_its_first_checkpoint_begins_again(here):
    recipe = started(here, write_recipe(here, model=GPT))
    with power_cut(after=3):
        train(recipe, folder=here / "cut", quiet=True)
    assert steps_of(here / "cut") == []
    resume(here / "cut", quiet=True)
    train(recipe, folder=here / "whole", quiet=True)
    assert_same_run(here / "whole", here / "cut", 20)


def test_a_finished_run_has_nothing_to_do_and_goes_on_with_more_steps(here):
    recipe = started(here, write_recipe(here, model=GPT, schedule={"name": "constant"}))
    train(recipe, {"train": {"steps": 10}}, folder=here / "run", quiet=True)
    before = checkpoint(here / "run", 10).stat().st_mtime_ns
    resume(here / "run", quiet=True)
    assert steps_of(here / "run") == [10] and checkpoint(here / "run", 10).stat().st_mtime_ns == before
    resume(here / "run", {"train": {"steps": 20}}, quiet=True)
    train(recipe, folder=here / "whole", quiet=True)
    assert_same_run(here / "whole", here / "run", 20)


# --- killed and stopped, as a person does it -------------------------------------------------------------------------


def test_a_killed_process_goes_on_bit_for_bit(here):
    recipe = started(here, write_recipe(here, model=GPT, train={"steps": 100_000, "save_every": 20}))
    process = command("train", recipe, "--out", here / "cut", "--quiet")
    wait_for(process, checkpoint(here / "cut", 20))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    last = max(steps_of(here / "cut"))
    with power_cut(after=last + 5):  # one that is killed again, on the way to a later checkpoint
        resume(here / "cut", {"train": {"save_every": last + 4}}, quiet=True)
    with power_cut(after=last + 5):
        train(recipe, {"train": {"save_every": last + 4}}, folder=here / "whole", quiet=True)
    assert_same_run(here / "whole", here / "cut", last + 4)


def test_ctrl_c_saves_and_says_how_to_go_on(here):
    recipe = started(here, write_recipe(here, model=GPT, train={"steps": 100_000, "save_every": 20}))
    process = command("train", recipe, "--out", "cut")
    wait_for(process, checkpoint(here / "cut", 20))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    last = max(steps_of(here / "cut"))
    assert "stopping after this step" in said
    assert f"stopped at step {last}; `heedful train --resume cut` goes on" in said
    assert process.returncode == 0 and "Traceback" not in said
    assert heedful.load("cut").model.n_parameters() > 0
    assert json.loads((here / "cut/summary.json").read_text())["reason"] == "stopped"
    with power_cut(after=last + 5):
        main(["train", "--resume", "cut", "--quiet", "--set", f"train.save_every={last + 4}"])
    with power_cut(after=last + 5):
        train(recipe, {"train": {"save_every": last + 4}}, folder=here / "whole", quiet=True)
    assert_same_run(here / "whole", here / "cut", last + 4)
