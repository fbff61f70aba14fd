"""`heedful train FILE`: what the file is recognised as, what is chosen for it, and how to choose otherwise."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

import heedful
from heedful.cli import main
from heedful.recipes.build import build_training
from heedful.recipes.resolve import resolve_recipe
from support.serving import shared_data
from support.trainings import WORDS, logged, own_cache, write_pairs, write_reviews, write_story

draw = random.Random(0)
ROWS = [" ".join(draw.choices(WORDS, k=draw.randint(4, 8))) for _ in range(60)]
OTHER = ROWS[1:] + ROWS[:1]
SPAM = ["spam" if i % 3 else "ham" for i in range(60)]


def table(*columns, header: str = "", mark: str = ",") -> str:
    return (header + "\n" if header else "") + "".join(
        mark.join(map(str, row)) + "\n" for row in zip(*columns, strict=True)
    )


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


TALK = [
    {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
    for a, b in zip(ROWS, OTHER, strict=True)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]}
    for a, b in zip(ROWS, OTHER, strict=True)
]
ALPACA = [{"instruction": a, "input": "", "output": b} for a, b in zip(ROWS, OTHER, strict=True)]
BINARY = [i % 2 for i in range(60)]
SQUAD = {"data": [{"paragraphs": [{"context": "A b", "qas": [{"question": "q", "id": "1", "answers": []}]}]}]}
# File -> its content, the kind of data, the objective, settings of [data], and what is said.
FILES = {
    "a.csv": (table(ROWS, SPAM, header="text,label"), "labelled classify text=text label=label", "spam 40, ham 20"),
    "kaggle.csv": (
        table(SPAM, [f'"{row}, £5"' for row in ROWS], ["", *[""] * 59], header="v1,v2,").encode("latin-1"),
        "labelled classify text=v2 label=v1",
        "60 rows, 2 labels: spam 40, ham 20",
    ),
    "semicolons.csv": (
        table(SPAM, ROWS, header="Kategorie;Nachricht", mark=";"),
        "labelled classify text=Nachricht label=Kategorie",
        "2 labels",
    ),
    "SMSSpamCollection": (table(SPAM, ROWS, mark="\t"), "labelled classify text= label=", "2 labels: spam 40, ham 20"),
    "repeated.tsv": (
        "a fine film\t1\na dull mess\t0\nbad\t0\nwarm and funny\t1\nnot good\t0\ngreat\t1\n" * 3,
        "labelled classify",
        "18 rows, 2 labels: 1 9, 0 9",
    ),
    "utf16.tsv": (table(ROWS, SPAM, header="text\tlabel", mark="\t").encode("utf-16"), "labelled classify", "2 labels"),
    "c.jsonl": (
        lines(*({"id": i, "review": row, "sentiment": i % 2} for i, row in enumerate(ROWS))),
        "labelled classify text=review label=sentiment",
        "2 labels: 0 30, 1 30",
    ),
    "stars.csv": (table(ROWS, [1 + i % 5 for i in range(60)], header="review,stars"), "labelled classify", "5 labels"),
    "sts.tsv": (
        table(ROWS, OTHER, [i % 5 + 0.25 for i in range(60)], header="sentence1\tsentence2\tscore", mark="\t"),
        "labelled regress text=sentence1 second=sentence2 label=score",
        "60 rows, numbers",
    ),
    "jigsaw.csv": (
        table(ROWS, BINARY, [int(i % 3 == 0) for i in range(60)], header="comment_text,toxic,insult"),
        "labelled multi_label text=comment_text label=toxic,insult",
        "2 labels each",
    ),
    "languages.csv": (table(ROWS, OTHER, header="de,en"), "pairs seq2seq text=de target=en", "from de to en): 60 rows"),
    "st.csv": (table(ROWS, OTHER, header="source,target"), "pairs seq2seq text=source target=target", "60 rows"),
    "qa.csv": (table(ROWS, OTHER, header="question,answer"), "pairs seq2seq text=question target=answer", "60 rows"),
    "pairs.tsv": (table(ROWS, OTHER, mark="\t"), "pairs seq2seq text= target=", "pairs of texts"),
    "anki.txt": (
        table(ROWS, OTHER, [f"CC-BY 2.0 (France) Attribution: tatoeba.org #{i} (CK)" for i in range(60)], mark="\t"),
        "pairs seq2seq",
        "from the first column to the second): 60 rows",
    ),
    "openai.jsonl": (lines(*TALK), "chat causal", "conversations: 60"),
    "sharegpt.json": (json.dumps(SHAREGPT), "chat causal", "conversations: 60"),
    "alpaca.json": (json.dumps(ALPACA, indent=1), "chat causal", "conversations: 60"),
    "completions.jsonl": (
        lines(*({"prompt": a, "completion": b} for a, b in zip(ROWS, OTHER, strict=True))),
        "chat causal",
        "conversations: 60",
    ),
    "dpo.jsonl": (lines({"prompt": "a", "chosen": "b", "rejected": "c"}), "preferences dpo", "rejected answers: 1"),
    "plain.txt": ("\n".join(ROWS), "text causal", "trains a new language model"),
    "ids.csv": (table(range(60), ROWS, header="id,text"), "text causal", "texts in a table"),
    "titled.jsonl": (lines(*({"text": row, "title": f"{i}"} for i, row in enumerate(ROWS))), "text causal", "a table"),
    "conll.txt": ("Anna B-PER\nlives O\n\n" * 9, "tagged tag", "words with tags"),
    "squad.json": (json.dumps(SQUAD), "answers answer", "SQuAD's form"),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
        patch.delenv("HEEDFUL_DATA", raising=False)
        yield


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognised(here, name):
    content, wanted, said = FILES[name]
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = resolve_recipe(name)
    kind, objective, *settings = wanted.split()
    data = found.recipe.data
    assert (data.kind, found.recipe.objective.name) == (kind, objective)
    for setting in settings:
        key, _, value = setting.partition("=")
        assert getattr(data, key) == value, key
    assert said in " ".join(found.notes) and found.notes[0].startswith(f"{name}: ")
    assert "--as text|labels|pairs|chat|images" in found.notes[1]


@pytest.mark.parametrize("name", ["kaggle.csv", "semicolons.csv", "SMSSpamCollection", "jigsaw.csv", "anki.txt"])
def test_what_was_recognised_is_read(here, name):
    content = FILES[name][0]
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    setup = build_training(resolve_recipe(name, {"tokenizer": {"vocab_size": 300}}).recipe)
    assert len(setup.train) == 54 and len(setup.validation or ()) == 6
    if name == "kaggle.csv":
        assert "£" in {setup.tokenizer.token(i).removeprefix("##") for i in range(len(setup.tokenizer))}


def test_files_that_belong_together(here):
    for language in ("de", "en"):
        (here / f"train.{language}").write_text("\n".join(ROWS))
    found = resolve_recipe("train.de").recipe
    assert (found.data.kind, found.data.target) == ("pairs", "train.en")
    (here / "train.fr").write_text("\n".join(ROWS))
    assert resolve_recipe("train.de").recipe.data.kind == "text"  # with which of the two?


def test_folders(here):
    pillow = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            folder = here / "pets" / part / label
            folder.mkdir(parents=True)
            pillow.new("RGB", (8, 8)).save(folder / "1.png")
    found = resolve_recipe("pets")
    assert found.recipe.data.kind == "images" and "2 images, 2 labels: cat, dog" in found.notes[0]
    assert (found.recipe.data.source, found.recipe.data.validation) == ("pets/train", "pets/val")
    with pytest.raises(ValueError, match=r"not a folder for each class: .* pets/train/cat/cat/1\.jpg"):
        resolve_recipe("pets/train/cat")
    write_story(here / "texts.txt")
    (here / "texts").mkdir()
    write_story(here / "texts/a.txt")
    assert resolve_recipe("texts").recipe.data.kind == "text"


def test_another_kind_may_be_chosen(here, capfd):
    (here / "a.csv").write_text(FILES["a.csv"][0])
    assert resolve_recipe("a.csv", kind="text").recipe.data.kind == "text"
    (here / "qa.csv").write_text(FILES["qa.csv"][0])
    assert resolve_recipe("qa.csv", kind="chat").recipe.model == {"init_from": "chat"}
    assert resolve_recipe("qa.csv", init_from="shakespeare").recipe.data.kind == "chat"
    assert resolve_recipe("qa.csv", init_from="t5-tasks").recipe.data.kind == "pairs"
    (here / "odd.csv").write_text(table(range(60), ROWS, OTHER, SPAM, header="id,body,more,kind"))
    for kind, columns in {"labels": ("body", "kind", ""), "pairs": ("body", "", "more")}.items():
        data = resolve_recipe("odd.csv", kind=kind).recipe.data
        assert (data.text, data.label, data.target) == columns
    assert resolve_recipe("odd.csv", {"data": {"label": "kind", "text": "more"}}).recipe.data.text == "more"
    assert resolve_recipe("odd.csv", {"data": {"target": "more", "text": "body"}}).recipe.data.kind == "pairs"
    assert resolve_recipe("odd.csv", {"data": {"text": "more"}}).recipe.data.kind == "text"
    assert main(["train", "tiny", "--as", "text"]) == 2 and "tiny is a recipe" in capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["parquet", "xlsx", "pkl"])
def test_what_cannot_be_read_says_how_to_convert_it(here, suffix, capfd):
    (here / f"data.{suffix}").write_bytes(b"PAR1\0\0")
    assert main(["train", f"data.{suffix}"]) == 2
    assert f"data.{suffix}: .{suffix} files are not read" in capfd.readouterr().err
    assert [path.name for path in here.iterdir()] == [f"data.{suffix}"]


# --- trainings -------------------------------------------------------------------------------------------------------

SHORT = "train.steps=2 train.batch_size=4 train.eval_batches=1 train.device=cpu data.length=32".split()
SHORT = [word for setting in SHORT for word in ("--set", setting)]


def test_labelled_texts_by_one_command(here, capfd):
    write_reviews(here / "cats.csv")
    (here / "cats.csv").write_text((here / "cats.csv").read_text().replace("\t", ","))
    assert main(["train", "cats.csv", "--set", "tokenizer.vocab_size=90", *SHORT]) == 0
    said = capfd.readouterr().err
    assert re.search(
        r"cats\.csv: labelled texts \(text in text, label in label\): 60 rows, 2 labels: with\w* \d+", said
    )
    assert "use it " in said and 'heedful classify --model runs/cats-1 "..."' in said
    assert set(heedful.load("runs/cats-1").model.config.labels) == {"with", "without"}
    notes = [line["text"] for line in logged(here / "runs/cats-1", "note")]
    assert notes[0].startswith("cats.csv: labelled texts")


def test_a_translator_learns_pairs_by_one_command(here, capfd):
    write_pairs(here / "pairs.tsv")
    assert main(["train", "translator", "pairs.tsv", *SHORT, "--out", "more"]) == 0
    said = capfd.readouterr().err
    assert "pairs of texts" in said and "fine-tunes translator" in said and "begins from translator" in said
    assert 'heedful translate --model more "..."' in said
    assert main(["translate", "--model", "more", "the cat"]) == 0


def test_a_small_text_stops_early_and_says_so(here, capfd):
    """With a learning rate of 0 no evaluation is better than the first one."""
    write_story(here / "my.txt", 1, n_words=400)
    small = "model.d_model=16 model.n_layers=1 model.n_heads=2 model.family=gpt data.length=16 train.batch_size=4"
    words = [*small.split(), "optimizer.lr=0", "optimizer.muon_lr=0", "train.steps=100", "train.device=cpu"]
    words = [word for setting in words for word in ("--set", setting)]
    assert main(["train", "my.txt", *words, "--set", "log.samples=false"]) == 0
    said = capfd.readouterr().err
    assert "stopped early, at step 40 of 100: the validation loss was lowest at step 10 (" in said
    assert re.search(r"steps +40 of 100 \(stopped early\)", said) and "--set train.patience=0 never stops early" in said
    summary = json.loads((here / "runs/my-1/summary.json").read_text())
    assert (summary["reason"], summary["best_step"]) == ("patience", 10)
    assert main(["info", "runs/my-1"]) == 0 and "step-0000010" in capfd.readouterr().out  # what generate uses
    resume = re.search(r"heedful (train --resume runs/my-1 --set train\.patience=0)", said)
    assert resume, said
    assert main([*resume[1].split()]) == 0  # what is said to type goes on, to the end
    assert json.loads((here / "runs/my-1/summary.json").read_text())["step"] == 100


def test_real_files():
    for path, said in {
        "sms-spam/sms.tsv": "5,574 rows, 2 labels: ham 4,827, spam 747",
        "sst2/dev.tsv": "872 rows, 2 labels: 1 444, 0 428",
        "toxicity/surge_toxicity_en.csv.gz": "2 labels",
        "tatoeba/eng-deu.tsv.gz": "pairs of texts",
        "multi30k/val.de.gz": "pairs: 1,014 lines, and those of val.en.gz",
        "conll2003/eng.testa.gz": "words with tags",
        "squad/xquad.en.json": "SQuAD's form",
        "shakespeare.txt": "shakespeare.txt: text",
    }.items():
        assert said in resolve_recipe(shared_data(*path.split("/"))).notes[0], path
