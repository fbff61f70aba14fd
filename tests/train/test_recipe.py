"""Recipes: those that ship, what is said of a wrong one, and changes on the command line."""

import dataclasses
import re
import tomllib

import pytest

from heedful.models.registry import FAMILIES
from heedful.recipes.build import choose_model, new_model, recipe_objective
from heedful.recipes.inputs import RecipeData
from heedful.recipes.resolve import AUTOMATIC
from heedful.train import optimizers
from heedful.train.adapters import adapt
from heedful.train.recipe import TABLES, Recipe, merge_tables, parse_changes, read_recipe, shipped_recipes
from heedful.train.run import to_toml

# What reading the data would have said of the model, by kind of data.
ASKED = {
    "text": {"vocab_size": 300, "start_id": 0},
    "pairs": {"vocab_size": 300, "start_id": 0},
    "reversal": {"vocab_size": 20, "start_id": 1},
    "pixels": {"vocab_size": 17, "max_len": 64},
    "images": {"n_labels": 10, "n_channels": 1, "image_size": 8, "labels": [str(i) for i in range(10)]},
    "labelled": {"vocab_size": 300, "n_labels": 2, "problem_type": "single_label_classification"},
    "tagged": {"vocab_size": 300, "n_labels": 9},
    "answers": {"vocab_size": 300},
}


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_that_ships_is_valid_and_builds_its_model(name):
    recipe = Recipe.from_dict(read_recipe(shipped_recipes()[name]))
    assert recipe.about and len(recipe.about) < 120 and "\n" not in recipe.about
    if "init_from" in recipe.model or recipe.objective.name == "distill":
        return  # its model is somewhere else
    data = RecipeData(None, None, n_tokens=10**6, settings=ASKED[recipe.data.kind])  # type: ignore[arg-type]
    model = new_model(choose_model(recipe, data), device="meta")
    adapt(model, recipe.adapter)
    optimizers.make_optimizer(model, recipe.optimizer)
    assert model.n_parameters() > 0 and recipe_objective(recipe, None) is not None
    last = optimizers.lr_factor(recipe.schedule, recipe.train.steps - 1, recipe.train.steps)
    assert recipe.schedule.warmup < recipe.train.steps and 0 <= last <= 1
    if "max_len" not in data.settings and recipe.data.kind != "images":
        assert model.context_length is None or model.context_length >= recipe.data.length


def test_every_family_has_a_recipe():
    families = {read_recipe(path)["model"].get("family") for path in shipped_recipes().values()}
    assert families >= set(FAMILIES), set(FAMILIES) - families


def test_a_recipe_is_the_same_after_it_was_written():
    for path in shipped_recipes().values():
        recipe = Recipe.from_dict(read_recipe(path))
        assert Recipe.from_dict(tomllib.loads(to_toml(recipe.to_dict()))) == recipe
    assert Recipe.from_dict(AUTOMATIC).train.steps == AUTOMATIC["train"]["steps"]


def test_defaults_are_valid_and_replace_checks_again():
    recipe = Recipe.from_dict({})
    assert recipe == Recipe() and recipe.replace(train={"steps": 7}).train.steps == 7
    with pytest.raises(ValueError, match=r"train\.steps is 0"):
        recipe.replace(train={"steps": 0})


# --- mistakes --------------------------------------------------------------------------------------------------------


def mistakes(given):
    with pytest.raises(ValueError) as told:
        Recipe.from_dict(given)
    first, *lines = str(told.value).splitlines()
    assert first == f"the recipe has {len(lines)} mistake{'s' * (len(lines) > 1)}:"
    return [line.strip() for line in lines]


WRONG = [
    ({"trian": {"steps": 3}}, r"trian.*did you mean train\?"),
    ({"train": {"stepz": 3}}, r"\[train\] has no setting 'stepz' \(did you mean steps\?\)"),
    ({"train": {"steps": 0}}, r"train\.steps is 0: it must be at least 1"),
    ({"train": {"steps": "many"}}, r"train\.steps"),
    ({"train": {"steps": 2.5}}, r"train\.steps"),
    ({"train": {"steps": True}}, r"train\.steps"),
    ({"train": {"clip": float("nan")}}, r"train\.clip"),
    ({"train": {"ema": float("inf")}}, r"train\.ema"),
    ({"train": {"checkpoint_activations": "yes"}}, r"train\.checkpoint_activations"),
    ({"train": {"precision": "bfloat"}}, r"train\.precision is 'bfloat'.*float32, bfloat16.*did you mean bfloat16\?"),
    ({"train": {"batch_size": 2, "accumulate": 3}}, r"train\.accumulate is 3: a step has 2 examples"),
    ({"train": {"seed": -1}}, r"train\.seed is -1"),
    ({"train": 3}, r"train is not a table: write \[train\]"),
    ({"about": 3}, "about is not a text"),
    ({"optimizer": {"name": "adam"}}, r"optimizer\.name is 'adam'.*did you mean adamw\?"),
    ({"optimizer": {"betas": [0.9]}}, r"optimizer\.betas"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer\.betas"),
    ({"optimizer": {"betas": 0.9}}, r"optimizer\.betas"),
    ({"optimizer": {"lr": -1e-3}}, r"optimizer\.lr"),
    ({"schedule": {"name": "cosin"}}, r"schedule\.name is 'cosin'.*did you mean cosine\?"),
    ({"schedule": {"final": 2}}, r"schedule\.final is 2: .*at most 1"),
    ({"data": {"kind": "image"}}, r"data\.kind is 'image'.*did you mean images\?"),
    ({"data": {"share": 1.0}}, r"data\.share"),
    ({"data": {"source": 3}}, r"data\.source"),
    ({"data": {"length": 10**9}}, r"data\.length"),
    ({"objective": {"name": "mask"}}, r"objective\.name is 'mask'.*did you mean masked\?"),
    ({"tokenizer": {"kind": "bpee"}}, r"tokenizer\.kind is 'bpee'.*did you mean bpe\?"),
    ({"adapter": {"targets": ["query", 3]}}, r"adapter\.targets"),
    ({"adapter": {"targets": "query"}}, r"adapter\.targets"),
    ({"model": {"family": "gtp"}}, r"no family is called 'gtp' \(did you mean gpt\?\)"),
    ({"model": {"family": "gpt", "n_layer": 3}}, r"n_layer.*did you mean n_layers\?"),
    ({"model": {"family": "gpt", "n_layers": -3}}, "n_layers"),
    ({"model": {"size": "gpt-2"}}, "gpt2"),
    ({"model": {"family": "gpt", "size": "gpt2"}}, "model has family and size: one of them"),
    ({"model": "gpt"}, r"model is not a table"),
    ({"model": {"family": ["gpt"]}}, "family"),
]  # fmt: skip


@pytest.mark.parametrize("given, said", WRONG, ids=[re.sub(r"\W+", " ", str(given)) for given, _ in WRONG])
def test_a_mistake_is_named_with_its_place_and_the_nearest_name(given, said):
    (line,) = mistakes(given)
    assert re.search(said, line), line


def test_every_mistake_is_named_at_once():
    given = {
        "trian": {},
        "about": 1,
        "model": {"family": "brt"},
        "train": {"stepz": 3, "clip": -1.0, "device": 7},
        "optimizer": {"name": "adam", "lr": "fast"},
        "data": {"kind": "image", "lenght": 5},
    }
    lines = mistakes(given)
    for part in ("trian", "about", "'brt'", "stepz", "clip", "device", "adam", "lr", "'image'", "lenght"):
        assert sum(part in line for line in lines) == 1, part
    assert len(lines) == 10


def test_a_file_that_is_no_toml_is_named(tmp_path):
    path = tmp_path / "my.toml"
    for content in (b"[train\nsteps = 3", b"\xff\xfe\x00", b"steps = 3\nsteps = 4"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"my\.toml is not TOML"):
            read_recipe(path)
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")  # as Notepad writes it
    assert read_recipe(path) == {"train": {"steps": 3}}


# --- on the command line ---------------------------------------------------------------------------------------------


def test_a_change_is_toml_or_else_text():
    told = [
        "train.steps=200",
        "train.clip = 0.5",
        "train.checkpoint_activations=true",
        "data.source=my file.txt",
    ]
    assert parse_changes(told) == {
        "train": {"steps": 200, "clip": 0.5, "checkpoint_activations": True},
        "data": {"source": "my file.txt"},
    }
    assert parse_changes(["optimizer.betas=[0.9, 0.95]"]) == {"optimizer": {"betas": [0.9, 0.95]}}
    assert parse_changes(['log.prompt="3"', "model.family=gpt"]) == {
        "log": {"prompt": "3"},
        "model": {"family": "gpt"},
    }
    assert parse_changes(['log.prompt=a = "b"', "log.prompt="])["log"]["prompt"] == ""
    source = parse_changes(['data.source=[{path = "a", weight = 2}, {path = "b"}]'])["data"]["source"]
    assert source == [{"path": "a", "weight": 2}, {"path": "b"}]
    assert parse_changes(["train.steps=1", "train.steps=2"]) == {"train": {"steps": 2}}
    assert parse_changes(["data.source=a\nb = 3"])["data"]["source"] == "a\nb = 3"  # a text, and no second setting


@pytest.mark.parametrize("wrong", ["train.steps", "=3", "train..steps=3", "Train.Steps=3", ".steps=1", "train steps=3"])
def test_what_is_no_change_is_refused(wrong):
    with pytest.raises(ValueError, match=r"table\.key=value"):
        parse_changes([wrong])


def test_tables_are_merged_and_nothing_given_is_changed():
    base = {"train": {"steps": 1, "clip": 2.0}, "about": "a"}
    assert merge_tables(base, {"train": {"steps": 3}, "data": {"length": 4}}) == {
        "train": {"steps": 3, "clip": 2.0},
        "about": "a",
        "data": {"length": 4},
    }
    assert base == {"train": {"steps": 1, "clip": 2.0}, "about": "a"}


def test_every_table_is_part_of_a_recipe():
    names = {f.name for f in dataclasses.fields(Recipe)}
    assert names == {*TABLES, "about", "expected", "measured_on", "model"}
