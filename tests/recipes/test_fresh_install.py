"""Every recipe that ships runs where there is no data at all: on data that heedful makes, and it says so."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import heedful
from heedful.cli import main
from heedful.data import samples
from heedful.data.classification import read_labelled
from heedful.data.pairs import read_pairs
from heedful.data.squad import read_squad
from heedful.data.tagging import read_tagged
from heedful.recipes.build import build_training
from heedful.recipes.data_paths import SAMPLE_OF
from heedful.recipes.launch import train
from heedful.recipes.resolve import resolve_recipe
from heedful.train.adapters import adapt
from heedful.train.distributed import Processes
from heedful.train.recipe import read_recipe, shipped_recipes
from heedful.train.run import Run
from heedful.train.trainer import Trainer
from support.trainings import SMALL, own_cache, power_cut, steps_of, write_pairs, write_story

SHORT = {"steps": 1, "batch_size": 2, "eval_batches": 1, "workers": 0, "device": "cpu"}
COMMAND = [word for key, value in SHORT.items() for word in ("--set", f"train.{key}={value}")]


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory):
    """An empty cache and no folder of data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
        patch.delenv("HEEDFUL_DATA", raising=False)
        patch.setattr(samples, "N_ROWS", 240)  # for speed, and a part of the text
        make, suffix = samples.SAMPLES["text"]
        patch.setitem(samples.SAMPLES, "text", (lambda: make()[:60_000], suffix))
        yield


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_runs_without_data(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # no dependency of heedful
    changes = {"train": SHORT}
    text = shipped_recipes()[name].read_text()
    if "init_from" not in text:
        changes |= {"tokenizer": {"vocab_size": 300}, "data": {"length": 128 if 'kind = "bytes"' in text else 32}}
    elif 'kind = "chat"' in text:
        changes |= {"data": {"length": 96}}
    found = resolve_recipe(name, changes)
    is_image = found.recipe.data.kind in ("images", "pixels")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        setup = build_training(found.recipe)
    if is_image:
        assert "drawn ones are used instead" in str(told[0].message)
    elif found.recipe.data.kind != "reversal" and not str(found.recipe.data.source).startswith("sample:"):
        assert "is used instead, which heedful makes" in found.notes[0]
    adapt(setup.model, setup.recipe.adapter)
    with Processes.start("cpu") as processes:
        trainer = Trainer(
            setup.model, setup.objective, setup.train, setup.validation, setup.recipe, processes=processes
        )
        summary = trainer.train()
    assert summary.step == 1 and np.isfinite(summary.best)


def test_a_recipe_says_on_which_data_it_trains(capfd):
    assert main(["train", "tiny", *COMMAND]) == 0
    assert (
        "shakespeare.txt is neither here nor in a folder that HEEDFUL_DATA names: sample:text" in capfd.readouterr().err
    )
    assert main(["train", "--resume", "runs/tiny-1", "--set", "train.steps=2"]) == 0  # the sample is found again
    assert main(["train", "tiny", "--set", "data.source=shakespeare.txt"]) == 2  # named by the user: no replacement
    assert "there is no file shakespeare.txt" in capfd.readouterr().err
    Path("shakespeare.txt").write_text("To be, or not to be. " * 200)
    assert resolve_recipe("tiny").notes == []
    with pytest.raises(ValueError, match=r"no sample:txt: heedful makes sample:text, sample:reviews"):
        build_training(resolve_recipe("tiny", {"data": {"source": "sample:txt"}}).recipe)


def test_other_data_needs_no_more_than_its_source(empty):
    """The recipe's validation data and its parallel file belong to its own source."""
    write_story(empty / "my.txt", 1, n_words=600)  # one document
    assert main(["train", "bert", "--set", "data.source=my.txt", "--set", "tokenizer.vocab_size=90", *COMMAND]) == 0
    assert heedful.load("runs/bert-1").model.config.head == "pretraining"
    write_pairs(empty / "my.tsv")
    setup = build_training(resolve_recipe("transformer", {"data": {"source": "my.tsv"}, "train": SHORT}).recipe)
    assert len(setup.train) + len(setup.validation or ()) == 60
    kept = resolve_recipe("bert", {"data": {"source": "my.txt", "validation": "my.txt"}}).recipe.data
    assert kept.validation == "my.txt"


def test_the_samples_are_what_they_say():
    """Read back by the readers of each kind."""
    named = {str(read_recipe(path)["data"].get("source")) for path in shipped_recipes().values()}
    tests = {f"sample:{name}" for name in samples.SAMPLES if name.endswith("-test")}
    assert set(SAMPLE_OF.values()) - {"digits"} | named >= {f"sample:{name}" for name in samples.SAMPLES} - tests
    german, english = read_pairs(samples.sample_file("sample:captions"))[0]
    assert german[0].isupper() and german.endswith(".") and english.split()[0] in ("A", "Two", "Three")
    texts, _, labels, _ = read_labelled(samples.sample_file("sample:reviews"), None, None, None, "classify")
    assert set(labels) == {"0", "1"} and len(texts) == len(labels) == samples.N_ROWS
    passages, questions, notes = read_squad(samples.sample_file("sample:questions"))
    assert not notes and len(questions) == 5 * len(passages)
    tags = {tag for _, tags in read_tagged(samples.sample_file("sample:entities")) for tag in tags}
    assert tags == {"O", "B-PER", "I-PER", "B-LOC", "B-ORG", "I-ORG"}
    pixels, digits = samples.draw_digits()
    assert pixels.shape == (1797, 8, 8) and pixels.min() == 0 and pixels.max() == 16 and len(set(digits)) == 10
    zero, eight = pixels[digits == 0].mean(axis=0), pixels[digits == 8].mean(axis=0)
    assert zero[3:5, 3:5].mean() < 0.5 * eight[3:5, 3:5].mean()  # a zero has a hole


def test_a_start_that_fails_leaves_nothing_in_the_way(empty, monkeypatch, capfd):
    write_story(empty / "my.txt")
    words = ["train", "my.txt", "--out", "out", *COMMAND]
    words += ["--set", "data.length=16", "--set", "model.family=gpt", "--set", "model.d_model=16"]
    words += ["--set", "model.n_heads=2", "--set", "model.n_layers=1"]
    for wrong in ("train.patience=2 data.share=0", "log.tensorboard=true"):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        assert main([*words, *(w for setting in wrong.split() for w in ("--set", setting))]) == 2
        assert not (empty / "out").exists(), wrong
    assert main(words) == 0
    assert main(words) == 2 and "is a run already" in capfd.readouterr().err


def test_a_run_that_ended_before_its_first_checkpoint_makes_room(empty):
    write_story(empty / "my.txt")
    changes = {"train": {**SHORT, "steps": 4}, "model": {"family": "gpt", **SMALL}, "data": {"length": 16}}
    with power_cut(after=1):
        train("my.txt", {**changes, "train": {**changes["train"], "save_every": 4}}, folder=empty / "out", quiet=True)
    busy = Run.open(empty / "out")
    busy.lock()
    with pytest.raises(ValueError, match="being trained by another process"):
        train("my.txt", changes, folder=empty / "out", quiet=True)
    busy.unlock()
    train("my.txt", changes, folder=empty / "out", quiet=True)
    assert (empty / "out/before-1/recipe.toml").exists() and steps_of(empty / "out")[-1] == 4
