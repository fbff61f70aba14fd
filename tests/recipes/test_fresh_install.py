"""Recipes that ship, where there is no data: those that need some say which, or train on a sample if asked to."""

from __future__ import annotations

import hashlib
import re
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
from heedful.recipes.data_paths import SOURCES, data_digest, find_source, is_built_in
from heedful.recipes.launch import train
from heedful.recipes.resolve import resolve_recipe
from heedful.train.adapters import adapt
from heedful.train.distributed import Processes
from heedful.train.recipe import read_recipe, shipped_recipes
from heedful.train.run import Run
from heedful.train.trainer import Trainer
from support.serving import shared_data
from support.trainings import SMALL, logged, own_cache, power_cut, steps_of, write_pairs, write_story

SHORT = {"steps": 1, "batch_size": 2, "eval_batches": 1, "workers": 0, "device": "cpu"}
COMMAND = [word for key, value in SHORT.items() for word in ("--set", f"train.{key}={value}")]


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory):
    """An empty cache and no folder of data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
        patch.delenv("HEEDFUL_DATA", raising=False)
        patch.setattr(samples, "N_ROWS", 240)  # for speed, and a part of the text
        for name in ("text", "shakespeare"):
            make, suffix = samples.SAMPLES[name]
            patch.setitem(samples.SAMPLES, name, (lambda make=make: make()[:60_000], suffix))
        yield


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_runs_on_a_sample(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # no dependency of heedful
    changes = {"train": SHORT}
    text = shipped_recipes()[name].read_text()
    if "init_from" not in text:
        changes |= {"tokenizer": {"vocab_size": 300}, "data": {"length": 128 if 'kind = "bytes"' in text else 32}}
    elif 'kind = "chat"' in text:
        changes |= {"data": {"length": 96}}
    source = read_recipe(shipped_recipes()[name])["data"].get("source", "")
    has_data = is_built_in(source) or name.startswith("reversal")
    if not has_data:
        with pytest.raises(ValueError, match=f"the data of the recipe {name} is not here: {re.escape(source)}"):
            resolve_recipe(name, changes)
    found = resolve_recipe(name, changes, sample=True)
    assert found.name == f"{name}-sample" and found.recipe.expected == ""
    assert ("changes nothing" if has_data else f"instead of {source}") in found.notes[0]
    is_image = found.recipe.data.kind in ("images", "pixels")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        setup = build_training(found.recipe)
    if is_image:
        assert "drawn ones are used instead" in str(told[0].message)
    adapt(setup.model, setup.recipe.adapter)
    with Processes.start("cpu") as processes:
        trainer = Trainer(
            setup.model, setup.objective, setup.train, setup.validation, setup.recipe, processes=processes
        )
        summary = trainer.train()
    assert summary.step == 1 and np.isfinite(summary.best)


def test_a_recipe_without_its_data_trains_on_nothing_else(empty, capfd, monkeypatch):
    assert main(["train", "conll"]) == 2
    said = capfd.readouterr().err
    assert "conll2003/eng.train.gz, conll2003/eng.testa.gz. It is CoNLL-2003" in said and "--sample" in said
    assert list(empty.iterdir()) == []
    (empty / "shelf/conll2003").mkdir(parents=True)
    (empty / "shelf/conll2003/eng.train.gz").touch()
    monkeypatch.setenv("HEEDFUL_DATA", str(empty / "shelf"))
    assert main(["train", "conll"]) == 2
    assert "is not here: conll2003/eng.testa.gz. It" in capfd.readouterr().err
    for words in (["my.txt"], ["conll", "--set", "data.source=my.txt"]):
        write_story(empty / "my.txt")
        assert main(["train", *words, "--sample"]) == 2 and "--sample" in capfd.readouterr().err


def test_a_sample_is_named_in_the_folder_and_in_the_log(empty, capfd):
    assert main(["train", "distilbert", "--sample", "--set", "data.length=16", *COMMAND]) == 0
    assert "trains on sample:reviews, which comes with heedful, instead of sst2/train.tsv" in capfd.readouterr().err
    notes = [line["text"] for line in logged(empty / "runs/distilbert-sample-1", "note")]
    assert any("sample:reviews" in note for note in notes)
    more = ["--set", "train.steps=2"]
    assert main(["train", "--resume", "runs/distilbert-sample-1", *more]) == 0  # the sample is found again
    assert main(["train", "distilbert", "--set", "data.source=sample:reveiws"]) == 2
    assert "no sample:reveiws: heedful has sample:shakespeare, sample:text" in capfd.readouterr().err


def test_shakespeare_ships(monkeypatch):
    """Every character of the file that nanoGPT downloads."""
    text = samples._shakespeare()
    assert len(text) == 1_115_394 and len(set(text)) == 65
    assert hashlib.sha256(text.encode()).hexdigest().startswith("86c4e6aa9db7c042")
    monkeypatch.setitem(samples.SAMPLES, "shakespeare", (lambda: text, "txt"))
    monkeypatch.setattr(samples, "VERSION", 1000)  # a file of its own
    for name in ("shakespeare", "shakespeare-quick"):
        found = resolve_recipe(name)
        assert found.recipe.data.source == "sample:shakespeare" and found.recipe.expected
        assert "measured with these settings on this data: validation loss 1.4" in found.notes[0]
        assert resolve_recipe(name, {"train": {"device": "cpu"}}).notes
        assert resolve_recipe(name, {"train": {"steps": 9}}).recipe.expected == ""
    Path("same.txt").write_text(text)
    Path("other.txt").write_text(text[1:])
    assert resolve_recipe("shakespeare", {"data": {"source": "same.txt"}}).notes
    other = resolve_recipe("shakespeare", {"data": {"source": "other.txt"}})
    assert other.notes == [] and other.recipe.expected == other.recipe.measured_on == ""


def test_scores_are_of_the_data_that_is_here():
    """For the recipes whose data is at hand, the digests are those of the files that the scores were measured on."""
    real = shared_data("sst2").parent
    n_measured = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEEDFUL_DATA", str(real))
        for path in shipped_recipes().values():
            recipe = read_recipe(path)
            known = find_source(recipe["data"].get("source", ""))
            if known is not None and recipe.get("measured_on") and (digest := data_digest(recipe["data"])):
                assert recipe["measured_on"] == digest, path.name
                n_measured += 1
    assert n_measured > 10


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
    assert {source.sample for source in SOURCES.values()} | named >= {
        f"sample:{name}" for name in samples.SAMPLES
    } - tests
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
