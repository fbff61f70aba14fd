"""A run that was broken off and goes on is the run that never was: every bit of its weights, state and log."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.recipes.build import build_training
from heedful.recipes.launch import resume, train
from heedful.train.recipe import Recipe, read_recipe
from heedful.train.run import Run, to_toml
from heedful.train.trainer import LossModule
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
    write_reviews,
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
        "tokenizer": {"kind": "bpe", "vocab_size": 300, "dropout": 0.2},
        "objective": {"name": "seq2seq", "smoothing": 0.1, "r_drop": 1.0},
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
    n = len(build_training(Recipe.from_dict(read_recipe(recipe))).train)
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


# --- what is refused, and what is told -------------------------------------------------------------------------------


@pytest.fixture
def run(here):
    recipe = started(here, write_recipe(here, model=GPT, train={"eval_every": 5}))
    with power_cut(after=13):
        train(recipe, folder=here / "run", quiet=True)
    assert steps_of(here / "run") == [5, 10]
    return here / "run"


def test_other_settings_are_refused_with_the_differences(run):
    with pytest.raises(ValueError, match="cannot be resumed with these") as refused:
        resume(run, {"optimizer": {"lr": 0.02}, "train": {"batch_size": 4, "steps": 15}}, quiet=True)
    said = str(refused.value)
    assert "optimizer.lr: 0.01 -> 0.02" in said and "train.batch_size: 8 -> 4" in said
    assert "train.steps: 20 -> 15" in said and f"--init-from {run}" in said
    resume(run, {"train": {"workers": 0, "accumulate": 1}, "log": {"samples": True}}, quiet=True)  # it is still good


def test_other_data_is_refused(here, run):
    text = (here / "data.txt").read_text()
    (here / "data.txt").write_text(text.replace("cat", "cow", 1))
    with pytest.raises(ValueError, match="not what it was trained on"):
        resume(run, quiet=True)
    (here / "data.txt").unlink()
    with pytest.raises(ValueError, match=r"data\.txt"):
        resume(run, quiet=True)
    (here / "data.txt").write_text(text)
    resume(run, quiet=True)
    assert steps_of(run)[-1] == 20


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "training.json", "manifest.json"])
def test_a_flipped_byte_is_found_and_the_checkpoint_before_is_used(here, run, file, capfd):
    train(here / "recipe.toml", folder=here / "whole", quiet=True)
    path = checkpoint(run, 10) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    capfd.readouterr()
    resume(run)
    said = capfd.readouterr().err
    assert "step-0000010 is damaged" in said and file in said and "using step-0000005" in said
    assert "going on from step 5" in said
    assert_same_run(here / "whole", run, 20)


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but its lock, which has the number of the process that held it last."""
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(here, run, capfd):
    for step in (5, 10):
        (checkpoint(run, step) / "training.safetensors").write_bytes(b"")
    before = contents(run)
    assert main(["train", "--resume", str(run)]) == 2
    said = capfd.readouterr().err
    assert "left as it is" in said and "step-0000010: training.safetensors has 0 bytes" in said
    assert f"`heedful train --resume {run} --restart`" in said
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").write_text("{}")  # of a run that had ended, so it had checkpoints
    with pytest.raises(ValueError, match="its checkpoints are gone"):
        resume(run, quiet=True)


def test_starting_anew_is_a_flag_and_loses_nothing(here, run, capfd):
    train(here / "recipe.toml", folder=here / "whole", quiet=True)
    (checkpoint(run, 5) / "config.json").unlink()
    (checkpoint(run, 10) / "config.json").unlink()
    before = contents(run)
    with pytest.raises(ValueError, match="began with other"):
        resume(run, {"train": {"seed": 3}}, restart=True, quiet=True)
    assert contents(run) == before
    assert main(["train", "--resume", str(run), "--restart"]) == 0
    assert f"what was there is in {run / 'before-1'}" in capfd.readouterr().err
    assert_same_run(here / "whole", run, 20)
    kept = {name: content for name, content in before.items() if name.startswith(("checkpoints/", "log"))}
    assert contents(run / "before-1") == kept
    assert main(["train", "recipe.toml", "--restart"]) == 2 and "--resume RUN" in capfd.readouterr().err


def test_a_run_belongs_to_one_process_at_a_time(here, run):
    with pytest.raises(ValueError, match="began with other"):  # a failed try does not keep it
        resume(run, {"train": {"seed": 3}}, quiet=True)
    first = Run.open(run)
    first.lock()
    with pytest.raises(ValueError, match=f"another process.*{os.getpid()}"):
        resume(run, quiet=True)
    first.unlock()
    resume(run, quiet=True)


def test_a_training_that_halts_leaves_its_last_checkpoint(here, monkeypatch, capfd):
    recipe = started(here, write_recipe(here, model=GPT, train={"eval_every": 5, "halt_after": 3}))
    train(recipe, folder=here / "whole", quiet=True)
    forward, calls = LossModule.forward, iter(range(1000))

    def spoiled(task, batch):
        loss = forward(task, batch)
        loss.sum = loss.sum * float("nan") if task.training and next(calls) >= 11 else loss.sum
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(LossModule, "forward", spoiled)
        assert main(["train", str(recipe), "--out", "cut"]) == 2
    said = capfd.readouterr().err
    assert "step 12 skipped: its gradient is not finite (1 in a row)" in said and "step 14 skipped" in said
    assert "heedful: 3 steps in a row had no finite gradient; the first layer with one is the loss" in said
    assert [line["step"] for line in logged(here / "cut", "note")] == [12, 13, 14]
    assert steps_of(here / "cut") == [5, 10]
    resume(here / "cut", quiet=True)
    assert_same_run(here / "whole", here / "cut", 20)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny GPT that was trained for a few steps; its run."""
    place = tmp_path_factory.mktemp("base")
    settings = changes(model={"family": "gpt", **SMALL}, train={"steps": 10})
    train(write_story(place / "base.txt", seed=5), settings, folder=place / "base", quiet=True)
    return place / "base"


ADAPTERS = {
    "lora": {"kind": "lora", "rank": 2, "dropout": 0.1},
    "lora beside a free layer": {
        "kind": "lora",
        "rank": 2,
        "targets": ["query"],
        "trainable": ["decoder.norm"],
    },
    "qlora": {"kind": "qlora", "rank": 2},
    "freeze": {"kind": "freeze", "trainable": ["blocks.1"]},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_fine_tuning_in_parts_resumes_bit_for_bit(here, base, name):
    settings = write_recipe(here, model={"init_from": str(base)}, adapter=ADAPTERS[name])
    recipe = started(here, settings)
    tuned = train(recipe, folder=here / "whole", quiet=True)
    with power_cut(after=13):
        train(recipe, folder=here / "cut", quiet=True)
    resume(here / "cut", quiet=True)
    assert_same_run(here / "whole", here / "cut", 20)
    files = {path.name for path in checkpoint(here / "whole", 20).iterdir()}
    assert ("adapter_model.safetensors" in files) == ("lora" in name)
    assert ("model.safetensors" in files) == ("lora" not in name)
    before, after = (dict(heedful.load(x).model.named_parameters()) for x in (base, here / "whole"))
    assert before.keys() == after.keys()  # merged: nothing of an adapter is left
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and "embed.weight" not in changed
    if name == "freeze":
        assert all(key.startswith("decoder.blocks.1.") for key in changed)
    assert tuned.generate("the ", max_tokens=3, temperature=0.0)


def test_an_adapter_needs_a_model_to_begin_from(here):
    with pytest.raises(ValueError, match="--init-from MODEL"):
        train(started(here, write_recipe(here, model=GPT, adapter={"kind": "lora"})), quiet=True)
    assert not (here / "runs").exists()


@pytest.fixture
def reviews(here):
    """Settings to learn labels from, for a BERT that has learned from text (in the folder `bert`)."""
    text = write_recipe(here, model={"family": "bert", **SMALL}, objective={"name": "masked"}, tokenizer=WORDPIECE)
    train(started(here, text), {"train": {"steps": 4, "eval_every": 4}}, folder=here / "bert", quiet=True)
    return started(
        here,
        changes(
            data={"kind": "labelled", "source": write_reviews(here / "reviews.tsv"), "length": 24},
            objective={"name": "classify"},
            train={"steps": 4, "eval_every": 4},
        ),
    )


def test_a_new_head_on_a_trained_encoder(here, reviews):
    """A BERT learns from text, then its head is another: fine-tuned whole, and the head alone."""
    whole = train(reviews, init_from="bert", folder=here / "whole", quiet=True)
    assert "classify" in whole.abilities and whole.model.config.labels == ("with", "without")
    only = {"adapter": {"kind": "head"}}
    alone = train(reviews, only, init_from="bert", folder=here / "head", quiet=True)
    body = {name: p for name, p in heedful.load("bert").model.named_parameters() if name.startswith("encoder")}
    for model, same in ((whole.model, False), (alone.model, True)):
        assert all(torch.equal(p, model.get_parameter(name)) for name, p in body.items()) == same


def test_a_new_head_learns_beside_adapters(here, reviews):
    """Nobody has trained it: it is no use frozen."""
    lora = {"adapter": {"kind": "lora", "rank": 2}}
    short = train(reviews, lora, init_from="bert", folder=here / "run", quiet=True)
    longer = resume(here / "run", {"train": {"steps": 8}}, quiet=True)
    assert not torch.equal(short.model.head.classifier.weight, longer.model.head.classifier.weight)
    assert "classify" in heedful.load(here / "run").abilities


def test_settings_of_the_model_go_with_init_from(here, base):
    source = write_story(here / "data.txt")
    given = changes(model={"dropout": 0.4}, train={"steps": 2, "eval_every": 2})
    tuned = train(source, given, init_from=str(base), folder=here / "run", quiet=True)
    assert tuned.model.config.dropout == 0.4 and tuned.model.config.d_model == SMALL["d_model"]


def test_reversal_says_how_many_symbols_and_sequences_are_right(tmp_path, capsys):
    changes = {"train": {"steps": 3, "eval_every": 3}, "data": {"n_examples": 100}, "model": {"attention": "bahdanau"}}
    train("reversal-short", changes, folder=tmp_path / "run")
    told = capsys.readouterr().err
    for name in "training", "test":
        assert re.search(rf"{name} data: [0-9.]+ % of symbols, [0-9.]+ % of sequences are right", told)
