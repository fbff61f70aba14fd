"""`heedful estimate`: what is said before a training is what the training then is."""

from __future__ import annotations

import itertools
import json

import pytest

from heedful.cli import main
from heedful.data.dataset import Draw
from heedful.models.registry import size
from heedful.recipes import estimate
from heedful.recipes.build import build_training
from heedful.recipes.dry_run import dry_run
from heedful.recipes.estimate import estimate_report
from heedful.recipes.published_size import size_recipe
from heedful.train import cost
from heedful.train.recipe import Recipe

SMALL = {"d_model": 32, "n_layers": 1, "n_heads": 2}
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n" * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(estimate, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(cost, "PROBE_SECONDS", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text(TEXT)
    return str(path)


def recipe(source: str, **tables) -> Recipe:
    tables = {"model": {"family": "gpt", **SMALL}, **tables}
    tables["data"] = {"source": source, "length": 16, **tables.get("data", {})}
    tables["train"] = {"steps": 50, "batch_size": 4, **tables.get("train", {})}
    return Recipe.from_dict(tables)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"model": {}},
        {"tokenizer": {"kind": "bytes"}},
        {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
        {"model": {"family": "t5", **SMALL, "d_head": 16, "d_ff": 64}, "objective": {"name": "spans"},
         "tokenizer": {"kind": "unigram", "vocab_size": 140}},
        {"model": {"family": "cbow", "d_model": 16}, "objective": {"name": "cbow"}, "tokenizer": {"kind": "words"}},
        {"model": {"family": "seq2seq", "d_model": 16, "attention": "dot"}, "objective": {"name": "seq2seq"},
         "data": {"kind": "reversal", "length": 4, "n_examples": 100}},
    ],
    ids=["characters", "automatic", "bytes", "bpe", "spans", "cbow", "reversal"],
)  # fmt: skip
def test_the_imagined_model_is_the_one_that_is_trained(text, tables):
    told = recipe(text, **tables)
    plan, real = dry_run(told), build_training(told)
    assert plan.model.family == real.model.family
    if told.tokenizer.kind in ("bpe", "unigram", "words"):  # as many tokens as the text is good for, at most
        assert plan.model.config.replace(vocab_size=2) == real.model.config.replace(vocab_size=2)
        assert plan.model.config.vocab_size >= real.model.config.vocab_size
    else:
        assert plan.model.config == real.model.config
    imagined, drawn = plan.batch(4), real.train.batch([Draw(0, i) for i in range(4)], 0)
    assert imagined.ids.shape[0] == drawn.ids.shape[0]
    if told.objective.name == "causal":
        assert imagined.ids.shape == drawn.ids.shape and imagined.targets.shape == drawn.targets.shape


def test_a_page_with_every_part(text):
    page = estimate_report(recipe(text))
    n = build_training(recipe(text)).model.n_parameters()
    assert f"gpt of {n:,} parameters" in page
    assert "tokens of a step                          64" in page and "3,200" in page  # 50 steps of 4 x 16
    for part in ("weights", "(gradients, ", "optimizer (adamw)", "activations", "together", "it fits"):
        assert part in page
    assert "FLOPs per token" in page and "steps on this machine" in page and "without evaluation" in page


def test_other_programs_are_reported(text, monkeypatch, tmp_path):
    """The file is the system's count of CPU time, of which others use ever more."""
    monkeypatch.setattr(estimate, "STAT", tmp_path / "none")
    assert "on an idle machine, as it is now" in estimate_report(recipe(text))
    monkeypatch.setattr(estimate, "STAT", stat := tmp_path / "stat")
    used, read = itertools.count(0, 10**6), estimate._used_by_others

    def read_next() -> float:
        stat.write_text(f"cpu  {next(used)} 0 0 9 9\ncpu0 1 1 1\n")
        return read()

    monkeypatch.setattr(estimate, "_used_by_others", read_next)
    assert " cores meanwhile: on an idle machine it is faster" in estimate_report(recipe(text))


def test_the_time_of_all_steps_counts_not_that_of_most(text, monkeypatch):
    """Next to another program a step that waits for a core may take as long as ten others."""
    seconds = itertools.chain([9.0], itertools.cycle([0.1] * 9 + [1.1]))
    step = estimate._StepTimer.step
    monkeypatch.setattr(
        estimate._StepTimer, "step", lambda self, *a, **b: step(self, *a, **{**b, "seconds": next(seconds)})
    )
    monkeypatch.setattr(estimate, "PROBE_SECONDS", 60.0)
    monkeypatch.setattr(estimate, "MAX_STEPS", 21)
    assert estimate._time_steps(dry_run(recipe(text))) == (pytest.approx(0.2), 20)


def test_what_does_not_fit_says_what_does(text):
    told = recipe(text, train={"batch_size": 16})
    needs = estimate.estimate_training(dry_run(told)).memory.total
    page = estimate_report(told, limit=int(0.6 * needs))
    assert "it does not fit; this does:" in page and "--set train.accumulate=" in page
    assert "not measured" in page  # what does not fit is not run
    assert "no setting makes it" in estimate_report(told, limit=1000)


def test_a_model_too_large_to_try_is_told_from_the_rate_of_products():
    page = estimate_report(
        Recipe.from_dict(
            {"model": {"size": "gpt2", "n_layers": 2}, "data": {"length": 64}, "train": {"batch_size": 512}}
        ),
        limit=10**13,
    )
    assert "53,561,088" in page and "not measured: at 50% of the" in page
    assert "the data is not here" in page


@pytest.mark.parametrize("kind", ["lora", "qlora", "freeze"])
def test_adapters(text, kind):
    told = recipe(text, adapter={"kind": kind, "rank": 2, "trainable": ["decoder.norm"] if kind == "freeze" else []})
    found = estimate.estimate_training(dry_run(told))
    assert 0 < found.parameters.trainable < found.parameters.total / 2
    assert found.memory.optimizer < found.memory.weights


def test_distillation_counts_the_teacher_and_takes_half_of_it():
    told = Recipe.from_dict({
        "objective": {"name": "distill", "teacher": "shakespeare"}, "data": {"length": 32}, "train": {"batch_size": 4},
    })  # fmt: skip
    plan = dry_run(told)
    found = estimate.estimate_training(plan)
    assert found.memory.weights > 4 * found.parameters.total
    assert found.steps_tried == 0 and plan.model.config.n_layers == 3


def test_beginning_from_a_model_that_ships():
    told = Recipe.from_dict({"model": {"init_from": "shakespeare"}, "data": {"length": 32}, "train": {"batch_size": 2}})
    assert dry_run(told).model.n_parameters() == 2_731_392


def test_nothing_is_downloaded(monkeypatch):
    monkeypatch.setattr("heedful.weights.hub.download", lambda *_, **__: pytest.fail("it downloads"))
    with pytest.raises(ValueError, match="an estimate downloads nothing"):
        dry_run(Recipe.from_dict({"model": {"init_from": "nobody/nothing"}}))


def test_the_command(text, capsys, tmp_path):
    assert main(["estimate", text, "--set", "train.steps=7", "--set", "train.batch_size=2"]) == 0
    assert "7 steps" in capsys.readouterr().out
    bad = tmp_path / "bad.toml"
    bad.write_text("[train]\nstep = 3\n")
    assert main(["estimate", str(bad)]) == 2
    assert "step" in capsys.readouterr().err


def test_labels_tags_and_masks(tmp_path):
    labelled = tmp_path / "some.jsonl"
    labelled.write_text("".join(json.dumps({"text": f"good {i}", "label": i % 2}) + "\n" for i in range(30)))
    for name, kind in (("classify", "labelled"), ("regress", "labelled"), ("masked", "text")):
        told = recipe(
            str(labelled),
            model={"family": "bert", **SMALL, "d_ff": 64},
            objective={"name": name},
            data={"kind": kind, "text": "text", "label": "label" if kind == "labelled" else ""},
            tokenizer={"kind": "wordpiece", "vocab_size": 60},
        )
        found = estimate.estimate_training(dry_run(told))
        assert found.memory.total > 0 and found.flops.training > 2 * found.flops.forward


@pytest.mark.parametrize("name", ["pythia-14m", "bert-tiny", "t5-small", "transformer-base", "vit-ti-16", "igpt-s"])
def test_a_published_size_is_estimated_by_its_name(name):
    """`heedful info` knows these names; so does `heedful estimate`."""
    resolved = size_recipe(name, {"data": {"length": 32}, "train": {"steps": 7, "batch_size": 2}})
    plan = dry_run(resolved.recipe)
    assert "7 steps of 2" in resolved.notes[0] and plan.model.family == size(name).family
    assert plan.model.n_parameters() == size(name).parameters
    assert plan.batch(2).tokens is not None or plan.batch(2).images.shape[-1] == 224


def test_estimate_of_a_size_says_what_it_assumes(capsys):
    assert main(["estimate", "bert-tiny", "--set", "train.steps=3", "--set", "data.length=16"]) == 0
    out, errors = capsys.readouterr()
    assert "4,433,468" in out and "training bert-tiny from its first weights: 3 steps of 8 examples of 16" in errors
