"""`heedful train` as a person uses it: what it prints, what it writes, and what it says of a mistake."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful.cli import main
from heedful.data.loader import BatchLoader
from heedful.recipes.build import build_training
from heedful.train.recipe import Recipe, read_recipe, shipped_recipes
from support.trainings import (
    WORDS,
    command,
    logged,
    own_cache,
    steps_of,
    story,
    write_pairs,
    write_reviews,
    write_story,
)

TINY = "model.d_model=16 model.n_layers=1 model.n_heads=2 train.steps=2 train.batch_size=4 data.length=16".split()
QUICK = [*TINY, "log.samples=false", "train.device=cpu"]


def settings(*assignments: str) -> list[str]:
    return [part for assignment in assignments for part in ("--set", assignment)]


def train(*arguments: object, quick: bool = True) -> int:
    """Later settings win."""
    given = list(map(str, arguments))
    return main(["train", given[0], *settings(*(QUICK if quick else [])), *given[1:]])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = own_cache(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("HEEDFUL_DATA", raising=False)
        yield


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- a text is enough ------------------------------------------------------------------------------------------------


def test_a_text_is_enough(here, capfd):
    """Only the number of steps is given; everything else is chosen, printed and kept."""
    write_story(here / "my.txt", 60)
    assert main(["train", "my.txt", *settings("train.steps=5", "train.batch_size=4")]) == 0
    out, said = capfd.readouterr()
    assert out == ""  # what is for a person is on stderr
    assert re.search(r"characters tokenizer of \d+ tokens", said)
    assert "validation: 10% of the documents" in said and "in 54 documents" in said
    assert re.search(r"[\d,]+ examples to train on, [\d,]+ to validate with", said)
    assert re.search(r"llama of [\d,]+ parameters: n_layers \d+, d_model \d+, n_heads \d+", said)
    assert (
        "optimizer muon, lr 0.01, muon_lr 0.025, cosine schedule; 5 steps of 4 examples of at most 128 tokens" in said
    )
    assert re.search(r"step 5/5  loss \d", said) and "bits per byte" in said and "perplexity" in said
    assert re.search(r"best validation loss +\d+\.\d+ at step \d", said)
    assert "heedful generate runs/my-1" in said and "uniform baseline" in said
    run = here / "runs/my-1"
    assert {p.name for p in run.iterdir()} >= {
        *(
            "recipe.toml",
            "facts.json",
            "tokenizer.json",
            "log.jsonl",
            "summary.json",
            "samples",
            "checkpoints",
        )
    }
    assert [line["step"] for line in logged(run)] == [1, 2, 3, 4, 5]
    chosen = tomllib.loads((run / "recipe.toml").read_text())
    assert chosen["model"]["family"] == "llama" and chosen["model"]["d_model"] == 64
    assert chosen["train"]["steps"] == 5 and chosen["data"]["source"] == "my.txt"
    assert json.loads((run / "summary.json").read_text())["reason"] == "finished"
    main(["train", "runs/my-1/recipe.toml", "--quiet"])  # which is a recipe like any other
    again = here / "runs/recipe-1"
    assert logged(again) == logged(run)
    assert capfd.readouterr().err == ""  # quiet


def test_what_was_tokenized_is_not_tokenized_again(here, monkeypatch):
    write_story(here / "my.txt")
    train("my.txt", "--quiet")
    monkeypatch.setattr("heedful.data.prepare._build", lambda *_: pytest.fail("it is in the cache"))
    train("my.txt", "--quiet")
    (here / "my.txt").rename(here / "renamed.txt")
    train("renamed.txt", "--quiet")
    assert {p.name for p in (here / "runs").iterdir()} == {"my-1", "my-2", "renamed-1"}


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_two_runs_with_a_trained_tokenizer_are_one(here, kind):
    name = {"wordpiece": "masked", "unigram": "spans"}.get(kind, "causal")
    family = {"wordpiece": "bert", "unigram": "t5"}.get(kind, "gpt")
    write_story(here / "my.txt")
    for out in ("one", "two"):
        told = settings(f"tokenizer.kind={kind}", f"objective.name={name}", f"model.family={family}")
        train("my.txt", *told, "--out", out, "--quiet")
    one, two = (here / out / "checkpoints/step-0000002" for out in ("one", "two"))
    assert (one / "tokenizer.json").read_bytes() == (two / "tokenizer.json").read_bytes()
    left, right = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_folder_of_odd_files(here, capfd):
    """Windows line ends, a byte order mark, Latin-1, one line of 3 MB, an empty file."""
    odd = here / "odd"
    odd.mkdir()
    text = story(30).replace("\n\f\n", "\n")
    (odd / "crlf.txt").write_bytes(text.replace("\n", "\r\n").encode())
    (odd / "bom.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (odd / "latin.txt").write_bytes((text + "un café naïf déjà vu\n").encode("latin-1"))
    (odd / "line.txt").write_text(" ".join(WORDS) * 30_000)
    (odd / "empty.txt").write_text("")
    assert train("odd", "--set", "train.eval_batches=2") == 0
    said = capfd.readouterr().err
    assert "empty.txt is empty; left out" in said and "4 documents" in said
    assert re.search(r"latin\.txt: 4 bytes are not UTF-8 and were read as Windows-1252", said)
    tokenizer = heedful.load("runs/odd-1").tokenizer
    known = {tokenizer.token(i) for i in range(len(tokenizer))}
    assert {"é", "ï", "à", "\n"} <= known and not {"\r", "\ufeff", "\ufffd"} & known


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv"])
def test_rows_of_a_table(here, suffix, capfd):
    lines = story(50).split("\n\f\n")
    path = here / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"text": text, "title": str(i)}) + "\n" for i, text in enumerate(lines)))
    else:
        mark = "," if suffix == "csv" else "\t"
        path.write_text(f"id{mark}text\n" + "".join(f'{i}{mark}"{t.strip()}"\n' for i, t in enumerate(lines)))
    assert train(path.name) == 0
    assert "45 documents" in capfd.readouterr().err
    path.write_text(path.read_text().replace("text", "body"))
    assert train(path.name) == 2
    said = capfd.readouterr().err
    assert "body" in said and "data.text" in said
    assert train(path.name, "--set", "data.text=body") == 0


def test_sources_are_mixed_by_weight(here, capfd):
    (here / "a.txt").write_text("a" * 3000)
    (here / "b.txt").write_text("b" * 3000)
    recipe = here / "mix.toml"
    recipe.write_text(
        '[model]\nfamily = "gpt"\n'
        '[data]\nsource = [{path = "a.txt", weight = 3}, {path = "b.txt"}]\nlength = 8\n'
        "[train]\nsteps = 60\nbatch_size = 8\neval_every = 60\n[optimizer]\nlr = 0.01\n[schedule]\nwarmup = 0\n"
    )
    assert main(["train", str(recipe), *settings(*TINY[:3], "log.samples=false", "model.dropout=0")]) == 0
    model = heedful.load("runs/mix-1")
    a, b = (model.tokenizer.encode(letter)[0] for letter in "ab")
    data = build_training(Recipe.from_dict(read_recipe(here / "runs/mix-1/recipe.toml")), model.tokenizer).train
    loader = BatchLoader(data, batch_size=8, seed=1)
    tokens = torch.cat([batch.ids[:, 0] for step in range(60) for batch in loader.step(step)])
    assert (tokens == a).float().mean() == pytest.approx(0.75, abs=0.05)
    assert int((tokens == a).sum() + (tokens == b).sum()) == len(tokens)
    for wrong in ("weight = 0", 'weight = "x"', "wight = 2"):
        recipe.write_text(recipe.read_text().replace("weight = 3", wrong))
        assert main(["train", str(recipe)]) == 2
        recipe.write_text(recipe.read_text().replace(wrong, "weight = 3"))
    assert "weight" in capfd.readouterr().err


def test_data_is_found_on_the_shelf(here, monkeypatch):
    (here / "shelf").mkdir()
    write_story(here / "shelf/far.txt")
    recipe = here / "far.toml"
    recipe.write_text('[model]\nfamily = "gpt"\n[data]\nsource = "far.txt"\n')
    assert train(recipe, "--quiet") == 2
    monkeypatch.setenv("HEEDFUL_DATA", str(here / "shelf"))
    assert train(recipe, "--quiet") == 0


# --- every kind of data by one command -------------------------------------------------------------------------------

BERT = ["model.family=bert", "tokenizer.vocab_size=80", "optimizer.name=adamw"]
KINDS = {
    "pairs": (write_pairs, ["data.kind=pairs", "objective.name=seq2seq", "model.family=transformer"]),
    "labelled": (write_reviews, ["data.kind=labelled", "objective.name=classify", *BERT]),
    "two texts, no segments": (
        lambda path: path.write_text(
            "text\tother\tlabel\n" + "".join(f"the {a}\t{b} cat\t{a == b}\n" for a in WORDS for b in WORDS[:5])
        ),
        ["data.kind=labelled", "data.second=other", "objective.name=classify", *BERT, "model.family=distilbert"],
    ),
    "numbers": (
        lambda path: path.write_text("text\tlabel\n" + "".join(f"the {w}\t{len(w) / 7}\n" for w in WORDS * 3)),
        ["data.kind=labelled", "objective.name=regress", *BERT],
    ),
    "tagged": (
        lambda path: path.write_text("".join(f"the O\n{w} B-X\nruns O\n\n" for w in WORDS * 2)),
        ["data.kind=tagged", "objective.name=tag", *BERT],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_data(here, kind):
    write, told = KINDS[kind]
    write(here / "data.tsv")
    assert train("data.tsv", *settings(*told), "--quiet") == 0
    assert heedful.load("runs/data-1").model.n_parameters() > 0


SHIPPED = {"vit": "model.d_ff=16", "image_gpt": "model.d_model=16", "reversal": "data.n_examples=60"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_that_ships_and_needs_no_files(here, name):
    if name != "reversal":
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    small = ["train.steps=2", "train.batch_size=4", "train.eval_batches=1", SHIPPED[name]]
    assert main(["train", name, *settings(*small), "--out", name, "--quiet"]) == 0
    assert steps_of(here / name)[-1] == 2


# --- a run's folder is a model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    write_story(place / "my.txt", 60)
    assert train(place / "my.txt", "--quiet", "--out", place / "run", "--set", "model.family=gpt") == 0
    return place / "run"


def test_a_run_is_generated_from_shown_and_exported(here, run, capsys):
    assert main(["generate", str(run), "the ", "--max-tokens", "5", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the ") and len(text.rstrip("\n")) > 4
    assert main(["info", str(run)]) == 0
    said = capsys.readouterr().out
    assert "family        gpt" in said and "step-0000002" in said and "16 positions" in said
    assert main(["tokenize", str(run), "the"]) == 0 and "'t'" in capsys.readouterr().out
    assert main(["export", str(run), "out"]) == 0
    assert {p.name for p in (here / "out").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not (here / "out/training.safetensors").exists()
    one, other = heedful.load(run), heedful.load("out")
    assert all(torch.equal(p, other.model.get_parameter(n)) for n, p in one.model.named_parameters())
    assert one.generate("a ", max_tokens=4, temperature=0) == other.generate("a ", max_tokens=4, temperature=0)


def test_a_run_begins_another(here, run, capfd):
    write_story(here / "more.txt", seed=9)
    told = settings("train.steps=2", "data.length=16", "log.samples=false")
    assert main(["train", "more.txt", "--init-from", str(run), *told]) == 0
    assert (here / "runs/more-1").is_dir()
    lora = settings("adapter.kind=lora", "adapter.targets=['query']", "optimizer.name=adamw")
    assert main(["train", "more.txt", "--init-from", str(run), *told, *lora]) == 0
    assert re.search(r"lora: [\d,]+ parameters learn", capfd.readouterr().err)
    assert main(["export", "runs/more-2", "merged"]) == 0
    base, merged = (dict(heedful.load(x).model.named_parameters()) for x in (run, "merged"))
    assert base.keys() == merged.keys()
    assert {n for n in base if not torch.equal(base[n], merged[n])} == {"decoder.blocks.0.attention.query.weight"}


def test_more_steps_are_a_resume(here, capfd):
    write_story(here / "my.txt")
    train("my.txt", "--quiet", "--out", "run")
    assert main(["train", "--resume", "run", "--set", "train.steps=4"]) == 0
    assert "going on from step 2" in capfd.readouterr().err and steps_of(here / "run")[-1] == 4


# --- the list, and mistakes ------------------------------------------------------------------------------------------


def test_the_recipes_are_listed_with_what_they_are(capsys):
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(shipped_recipes())
    assert all(len(line.split()) > 3 for line in lines[::2])


MISTAKES = {
    "shakespere": "no file, folder or recipe 'shakespere' (did you mean shakespeare?)",
    "missing.txt": "no file, folder or recipe 'missing.txt'",
    "empty.txt": "empty.txt is empty",
    "binary.txt": "binary.txt is not text",
    "void": "no text in the folder void",
    "short.txt": "tokens",
    "broken.toml": "broken.toml is not TOML",
    "wrong.toml": "did you mean length?",
    "my.txt --set train.stepz=3": "no setting 'stepz' (did you mean steps?)",
    "my.txt --set train.steps": "table.key=value",
    "my.txt --set model.n_heads=3": "n_heads",
    "my.txt --set model.family=gtp": "no family is called 'gtp' (did you mean gpt?)",
    "my.txt --set model.family=bert": "objective.name is 'causal', which is for a decoder",
    "my.txt --set objective.name=masked": "objective.name is 'masked', which is for an encoder",
    "my.txt --set objective.name=seq2seq": "data.kind 'text' teaches causal, masked, spans, cbow",
    "my.txt --set objective.temperature=3": "'causal' has no setting 'temperature'",
    "my.txt --set train.device=tpu": "the device is 'tpu'",
    "my.txt --set data.length=100000": "data.length",
    "my.txt --set data.validation=missing.txt": "no file missing.txt",
    "my.txt --set adapter.kind=lora": "--init-from MODEL",
    "my.txt --set adapter.kind=freeze": "trainable",
    "my.txt --init-from nothing": "'nothing'",
    "my.txt --out my.txt": "my.txt is a file",
    "my.txt --out void/..": "holds something else",
    "my.txt --resume run": "--resume goes on with a run as it is",
    "--resume nothing": "nothing is no run: there is no such folder",
    "--resume void": "void is no run: it has no recipe.toml",
    "": "what to train on?",
    "two.txt --set data.kind=pairs --set data.target=three.txt --set objective.name=seq2seq --set model.family=t5": (
        "two.txt has 2 lines and three.txt has 3"
    ),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_a_mistake_is_said_in_a_line_and_leaves_nothing(here, told, capfd):
    write_story(here / "my.txt")
    (here / "empty.txt").touch()
    (here / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (here / "short.txt").write_text("ab")
    (here / "two.txt").write_text("a\nb\n")
    (here / "three.txt").write_text("a\nb\nc\n")
    (here / "void").mkdir()
    (here / "broken.toml").write_text("[train")
    (here / "wrong.toml").write_text('[data]\nsource = "my.txt"\nlenght = 3\n')
    before = sorted(here.rglob("*"))
    assert main(["train", *told.split()]) == 2
    said = capfd.readouterr().err
    last = said[said.index("heedful: ") :]
    assert MISTAKES[told] in last and "Traceback" not in said
    assert len(last.splitlines()) == 1 or re.match(r"heedful: the recipe has \d+ mistake", last)
    assert sorted(here.rglob("*")) == before


def test_a_real_process_says_it_too(here):
    process = command("train", "missing.txt")
    out, said = process.communicate()
    assert process.returncode == 2 and out == ""
    assert said.startswith("heedful: there is no file") and said.count("\n") == 1
