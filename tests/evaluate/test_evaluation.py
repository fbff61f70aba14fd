"""Evaluations: scores against sacrebleu, scikit-learn, scipy, SQuAD's script and conlleval; resuming, comparing."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import sacrebleu
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics

import heedful
from heedful.cli import main
from heedful.cli.info import score_lines
from heedful.evaluate import evaluation
from heedful.evaluate.bootstrap import value_of
from heedful.evaluate.entities import Entities
from heedful.evaluate.evaluation import compare
from heedful.evaluate.perplexity import score_text
from heedful.evaluate.report import format_saved
from heedful.evaluate.squad import Squad, answer_f1, exact_match
from heedful.evaluate.task import Item
from heedful.evaluate.tasks import create_task
from heedful.models.image_gpt import quantize
from heedful.tasks.answer import AnswerSpan
from support.documents import blocks

TEXT = "ROMEO:\nWhat light through yonder window breaks? It is the east.\n" * 9
REVIEWS = [("a fine film", 1), ("a dull mess", 0), ("bad", 0), ("warm and funny", 1), ("not good", 0), ("great", 1)]
GERMAN = ["Ein Mann fährt Rad.", "Zwei Hunde spielen im Schnee.", "Eine Frau liest.", "Kinder laufen am Strand."]
ENGLISH = ["A man rides a bike.", "Two dogs play in the snow.", "A woman is reading.", "Children run on the beach."]
CONLL = (
    "Mary B-PER\nlives O\nin O\nParis B-LOC\n\nThe O\nold O\nman O\n\nJohn B-PER\nSmith I-PER\nleft O\nRome B-LOC\n\n"
)
PASSAGE = "The old bridge was built in 1890 by John Smith. It leads over the river to the town of Ashford."
QUESTIONS = {"Who built the old bridge?": "John Smith", "When was it built?": "1890", "Which town?": "Ashford"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The data of each task."""
    folder = tmp_path_factory.mktemp("data")
    with gzip.open(folder / "text.txt.gz", "wt") as file:
        file.write(TEXT)
    (folder / "my.txt").write_text(TEXT)
    (folder / "reviews.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in REVIEWS))
    (folder / "test.de").write_text("\n".join(GERMAN) + "\n")
    (folder / "test.en").write_text("\n".join(ENGLISH) + "\n")
    (folder / "backwards.tsv").write_text("1 2 3\t3 2 1\n4 5\t5 6\n")
    (folder / "dev.conll").write_text(CONLL * 2)
    qas = [{"question": q, "answer": a} for q, a in QUESTIONS.items()]
    (folder / "questions.json").write_text(json.dumps([{"context": PASSAGE, "qas": qas}]))
    pairs = [("king", "queen", 8.5), ("river", "water", 7.0), ("stone", "night", 1.5), ("day", "night", 6.0)]
    (folder / "words.tsv").write_text("word1\tword2\tSimLex999\n" + "".join(f"{a}\t{b}\t{s}\n" for a, b, s in pairs))
    np.savez(folder / "digits.npz", images=np.random.default_rng(0).integers(0, 255, (3, 8, 8), dtype=np.uint8))
    return folder


CASES = {
    "perplexity": ("shakespeare", ["text.txt.gz"], {"window": 64, "stride": 32}),
    "translation": ("translator", ["test.de", "test.en"], {}),
    "exact_match": ("reversal", ["backwards.tsv"], {}),
    "squad": ("reader", ["questions.json"], {}),
    "entities": ("entities", ["dev.conll"], {}),
    "classification": ("sentiment", ["reviews.tsv"], {}),
    "similarity": ("bert-books", ["words.tsv"], {}),
    "bits_per_dimension": ("digits-gpt", ["digits.npz"], {}),
}


@pytest.fixture(scope="module")
def results(files):
    """Every task's evaluation, in batches of the default size and of 1."""
    found = {}
    for task, (name, data, settings) in CASES.items():
        loaded = heedful.load(name, dtype=torch.float32)
        paths = [files / file for file in data]
        found[task] = [loaded.evaluate(task, paths, batch_size=n, **settings) for n in (None, 1)]
    return found


@pytest.mark.parametrize("task", CASES)
def test_scores_do_not_depend_on_the_batch_size(results, task):
    one, other = results[task]
    for a, b in zip(one.scores, other.scores, strict=True):
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), rel=1e-4, abs=1e-4)
        assert a.low <= a.value <= a.high or a.metric == "ECE"
    said = [[r["prediction"] for r in result.records] for result in (one, other)]
    assert said[0] == (said[1] if isinstance(said[1][0], str) else pytest.approx(said[1], rel=1e-4))


def test_perplexity_is_that_of_the_whole_text(results):
    found = results["perplexity"][0]
    shakespeare = heedful.load("shakespeare", dtype=torch.float32)
    whole = score_text(shakespeare.model, shakespeare.tokenizer, TEXT, window=64, stride=32)
    assert found["perplexity"] == pytest.approx(whole.perplexity, rel=1e-5)
    assert found["bits per byte"] == pytest.approx(whole.bits_per_byte, rel=1e-5)
    assert found.details == {"tokens": whole.n_tokens, "bytes": whole.n_bytes}


def test_translations_are_scored_by_sacrebleu(results):
    found = results["translation"][0]
    said = [record["prediction"] for record in found.records]
    assert found["BLEU"] == sacrebleu.corpus_bleu(said, [ENGLISH]).score
    assert found["chrF"] == sacrebleu.corpus_chrf(said, [ENGLISH]).score
    assert found.details["signatures"]["BLEU"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    lower = create_task("translation", {"lowercase": True, "tokenize": "intl"}).metrics(found.records)
    ours = lower[0].values(np.ones((1, 4)))[0]
    assert ours == sacrebleu.corpus_bleu(said, [ENGLISH], lowercase=True, tokenize="intl").score


# Predictions, references, exact match and F1 as evaluate-v1.1.py of SQuAD prints them for one question.
SQUAD = [
    ("the Normans", ["Normans"], 100.0, 100.0),
    ("in 1890, by John", ["1890", "in 1890"], 0.0, 66.66666666666666),
    ("An old bridge!", ["The old-bridge", "old bridge."], 100.0, 100.0),
    ("Ashford", ["river"], 0.0, 0.0),
    ("the", ["a"], 100.0, 0.0),
]


def test_exact_match_counts_answers_and_symbols(results, files, tmp_path):
    scores = {s.metric: s.value for s in results["exact_match"][0].scores}
    assert scores == {"exact match": 50.0, "symbols": 75.0}
    (tmp_path / "sums.tsv").write_text("45 + 54=\t108\n12+34=\t0\n")  # a decoder, and spaces in a sum
    sums = heedful.load("sums")
    found = sums.evaluate("exact_match", tmp_path / "sums.tsv")
    assert found.records[0]["prediction"] == sums.generate("45+54=", temperature=0)


@pytest.mark.parametrize(("name", "near"), [("translaton", "translation"), ("nope", ""), ("hellaswg", "hellaswag")])
def test_an_unknown_task_is_refused_before_anything_is_loaded(name, near, capsys, monkeypatch):
    monkeypatch.setattr(heedful, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["eval", "tiny", name]) == 2
    told = capsys.readouterr().err
    assert f"there is no task {name!r}" in told and f"did you mean {near}" in told and "exact_match" in told


def test_the_list_of_tasks_has_aligned_columns(capsys):
    assert main(["eval", "--list"]) == 0
    assert "bits_per_dimension  bits per dimension" in capsys.readouterr().out


@pytest.mark.parametrize(("said", "right", "exact", "f1"), SQUAD)
def test_answers_are_scored_as_by_squads_script(said, right, exact, f1):
    assert 100 * max(exact_match(said, answer) for answer in right) == exact
    assert 100 * max(answer_f1(said, answer) for answer in right) == pytest.approx(f1)


def test_questions_without_an_answer_want_an_empty_one():
    class Silent:
        def answer(self, *_):
            return AnswerSpan("", 0, 0, 0.5)

    (record,) = Squad().predict(Silent(), [Item("1", ("Who?", PASSAGE), [], "Who?")])
    assert record["exact"] == record["score"] == 1
    others = [{"exact": 0.0, "score": 0.5, "answerable": True}, {"exact": 0.0, "score": 0.0, "answerable": False}]
    told = {m.name: value_of(m, 3) for m in Squad().metrics([record, *others])}
    assert told == {"exact match": 100 / 3, "F1": 50.0, "F1, has answer": 50.0, "right, no answer": 50.0}


def test_entities_are_counted_as_by_conlleval():
    """processed 13 tokens with 5 phrases; found: 5 phrases; correct: 2.
    accuracy: 76.92%; precision: 40.00%; recall: 40.00%; FB1: 40.00
    LOC: FB1: 66.67   ORG: FB1: 0.00   PER: FB1: 40.00"""
    true = ["B-PER I-PER O B-LOC O", "O B-ORG I-ORG I-ORG", "B-PER B-PER O O"]
    said = ["B-PER I-PER O B-LOC B-LOC", "O B-ORG I-ORG O", "B-PER I-PER O O"]
    task = Entities()
    records = [
        {"reference": t, "prediction": s, "entities": task._counts(t.split(), s.split())}
        for t, s in zip(true, said, strict=True)
    ]
    found = {metric.name: metric.values(np.ones((1, 3)))[0] for metric in task.metrics(records)}
    assert found == pytest.approx(
        {"F1": 40, "precision": 40, "recall": 40, "F1 LOC": 200 / 3, "F1 ORG": 0, "F1 PER": 40}
    )
    assert task.details(records)["word accuracy"] == pytest.approx(100 * 10 / 13)
    assert list(Entities(types="PER")._counts(true[0].split(), said[0].split())) == ["PER"]


def test_labels_are_scored_as_by_scikit_learn(results):
    found = results["classification"][0]
    true, said = ([record[key] for record in found.records] for key in ("reference", "prediction"))
    assert true == ["positive" if label else "negative" for _, label in REVIEWS]
    assert found["accuracy"] == pytest.approx(100 * sklearn_metrics.accuracy_score(true, said))
    assert found["macro-F1"] == pytest.approx(100 * sklearn_metrics.f1_score(true, said, average="macro"))
    labels = found.details["labels"]
    assert found.details["confusion"] == sklearn_metrics.confusion_matrix(true, said, labels=labels).tolist()


def test_similarity_is_spearmans(results):
    records = results["similarity"][0].records
    assert [record["reference"] for record in records] == [8.5, 7.0, 1.5, 6.0]
    expected = stats.spearmanr([r["prediction"] for r in records], [r["reference"] for r in records]).statistic
    assert results["similarity"][0]["Spearman"] == pytest.approx(100 * expected)


def test_a_correlation_of_one_pair_is_not_defined(files):
    found = heedful.load("bert-books").evaluate("similarity", files / "words.tsv", limit=1).to_dict()
    assert found["scores"][0]["value"] is None and json.dumps(found, allow_nan=False)
    assert format_saved(found) == "similarity on words.tsv, 1 item: Spearman nan [nan, nan]"


def test_images_are_classified(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (12, 28, 28), dtype=np.uint8)
    for name, array in (("x-images-idx3-ubyte", images), ("x-labels-idx1-ubyte", np.arange(12, dtype=np.uint8) % 10)):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        (tmp_path / name).write_bytes(head + array.tobytes())
    loaded = heedful.load("digits-vit")
    found = loaded.evaluate("classification", tmp_path / "x-images-idx3-ubyte", batch_size=5)
    scaled = torch.from_numpy(images).float()[:, None] * (2 / 255) - 1
    assert [r["prediction"] for r in found.records] == [loaded.classify(image)[0].name for image in scaled]
    from PIL import Image

    for i, image in enumerate(images):
        (tmp_path / "folder" / str(i % 10)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "folder" / str(i % 10) / f"{i}.png")
    again = loaded.evaluate("classification", tmp_path / "folder")
    assert again["accuracy"] == found["accuracy"]


def test_bits_per_dimension_are_those_of_the_pixels_one_by_one(results, files, tmp_path):
    found, images = results["bits_per_dimension"][0], np.load(files / "digits.npz")["images"]
    loaded = heedful.load("digits-gpt")
    model, scaled = loaded.model, torch.from_numpy(images).float()[:, None] * (2 / 255) - 1
    bits = []
    for ids in quantize(scaled, model.palette):
        logits, state = model.start(model.prompt(ids[None, :0]))
        for i, pixel in enumerate(ids):
            bits.append(-logits[0].log_softmax(dim=-1)[pixel].item() / np.log(2))
            logits = model.step(pixel[None], state) if i + 1 < len(ids) else logits
    assert found["bits per dimension"] == pytest.approx(np.mean(bits), rel=1e-4)
    assert found.details == {"dimensions": 3 * 64}
    np.savez(tmp_path / "wide.npz", images=images[:, :4])
    with pytest.raises(ValueError, match="1 x 8 x 8"):
        loaded.evaluate("bits_per_dimension", tmp_path / "wide.npz")
    with pytest.raises(ValueError, match="is a vit"):
        heedful.load("digits-vit").evaluate("bits_per_dimension", files / "digits.npz")


# --- kept items -------------------------------------------------------------------------------------------------------


def test_an_interrupted_evaluation_goes_on(files, tmp_path):
    """Killed after three batches, and in the middle of a line: no item is asked twice, and the result is the same."""
    loaded, data = heedful.load("sentiment", dtype=torch.float32), files / "reviews.tsv"
    whole = loaded.evaluate("classification", data)

    def kill(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(loaded, "classification", data, batch_size=1, out=tmp_path, progress=kill)
    (kept,) = tmp_path.glob("*/items.jsonl")
    assert kept.parent.name.startswith("sentiment-classification-reviews-") and len(kept.read_text().splitlines()) == 3
    with kept.open("a") as file:
        file.write('{"id": "3", "inp')
    seen = []
    found = evaluation.evaluate(
        loaded, "classification", data, batch_size=1, out=tmp_path, progress=lambda done, _: seen.append(done)
    )
    assert seen == [3, 4, 5, 6]
    assert [s.value for s in found.scores] == pytest.approx([s.value for s in whole.scores], rel=1e-4)
    assert [json.loads(line)["id"] for line in kept.read_text().splitlines()] == list("012345")
    saved = json.loads((kept.parent / "scores.json").read_text())
    assert saved == json.loads(json.dumps(found.to_dict()))
    assert {"task", "data", "data_hash", "n", "settings", "heedful", "scores"} <= saved.keys()
    assert {"metric", "value", "low", "high"} <= saved["scores"][0].keys()


def test_only_the_same_evaluation_goes_on(files, tmp_path):
    loaded, data = heedful.load("sentiment", dtype=torch.float32), files / "reviews.tsv"
    done = []

    def run(model=loaded, path=data, **options):
        done.clear()
        evaluation.evaluate(
            model, "classification", path, out=tmp_path, progress=lambda n, _: done.append(n), **options
        )
        return done[0]

    assert run(limit=2) == 0 and run() == 2 and run() == 6 and run(limit=4) == 4
    assert run(resume=False) == 0
    assert run(label=1, text=0) == 0  # other settings
    other = tmp_path / "more.tsv"
    other.write_text(data.read_text() + "fine\t1\n")
    assert run(path=other) == 0
    changed = heedful.load("sentiment", dtype=torch.float32)
    next(changed.model.parameters()).data.add_(0.1)
    assert run(changed) == 0
    names = {path.name for path in tmp_path.glob("*/scores*")}
    assert names == {"scores.json", "scores-first-2.json", "scores-first-4.json"}


# --- two models -------------------------------------------------------------------------------------------------------


def test_models_are_compared_on_the_same_items(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = heedful.load("sentiment", dtype=torch.float32)
    one = loaded.evaluate("classification", files / "reviews.tsv")
    tests = compare(one, one)
    assert [(t.metric, t.difference, t.p) for t in tests] == [("accuracy", 0, 1), ("macro-F1", 0, 1), ("ECE", 0, 1)]
    with pytest.raises(ValueError, match="not asked the same items"):
        compare(one, loaded.evaluate("classification", files / "reviews.tsv", limit=3))
    reviews = str(files / "reviews.tsv")
    assert main(["eval", "sentiment", "classification", reviews, "--compare", "sentiment"]) == 0
    out = capsys.readouterr().out
    assert "McNemar" in out and out.count("sentiment") == 7 and "+0.00" in out
    assert main(["eval", "sentiment", "classification", reviews, "--compare", "sentiment", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["results"]) == 2 and told["against_first"]["sentiment"][0]["mcnemar"] == 1


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_scores_and_info_shows_those_of_a_run(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "sentiment", "classification", "sample:reviews", "--limit", "5"]) == 0
    out = capsys.readouterr().out
    assert "the first 5 of" in out and "accuracy" in out and "true \\ said" in out
    assert list(tmp_path.glob("evaluations/sentiment-classification-*/scores-first-5.json"))
    evaluation_folder = tmp_path / "runs/one/evaluations/one-perplexity-x-1"
    evaluation_folder.mkdir(parents=True)
    told = {"metric": "perplexity", "value": 12.5, "low": 11.0, "high": 14.0, "unit": "", "higher_is_better": False}
    saved = {"task": "perplexity", "data": "x.txt", "n": 1234, "scores": [told]}
    (evaluation_folder / "scores.json").write_text(json.dumps(saved))
    assert score_lines(tmp_path / "runs/one") == [
        "score         perplexity on x.txt, 1,234 items: perplexity 12.50 [11.00, 14.00]"
    ]


def test_the_page_shows_what_is_saved(files, tmp_path):
    """docs/evaluation.md has an example of scores.json."""
    heedful.load("sentiment").evaluate("classification", str(files / "reviews.tsv"), out=str(tmp_path))
    (example,) = blocks("docs/evaluation.md", "json")
    (saved,) = tmp_path.rglob("scores.json")
    assert all(f'"{key}"' in example for key in json.loads(saved.read_text()))


def test_different_windows_are_not_paired(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["eval", "shakespeare", "perplexity", str(files / "my.txt"), "--limit", "2", "--compare", "tiny"]
    assert main(command) == 0
    assert "set the same window for both" in (out := capsys.readouterr().out) and "Differences" not in out
    assert main([*command, "--set", "window=32"]) == 0
    assert "Differences are from shakespeare" in (out := capsys.readouterr().out) and "McNemar" not in out


def test_tasks_are_listed(capsys):
    assert main(["eval", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*CASES, "lambada_openai", "arc_challenge", "window=0"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sentiment"], "which model, and which task"),
        (["sentiment", "perplexity", "TEXT"], "sentiment is a bert"),
        (["shakespeare", "perplexity"], "give a text file"),
        (["shakespeare", "perplexity", "nothing.txt"], "there is no file nothing.txt"),
        (["shakespeare", "perplexity", "TEXT", "--set", "windw=3"], "did you mean window?"),
        (["shakespeare", "perplexity", "TEXT", "--set", "window=wide"], "it must be int"),
        (["shakespeare", "perplexity", "TEXT", "--set", "window=64", "--set", "stride=65"], "a stride of 65"),
        (["shakespeare", "perplexity", "TEXT", "--limit", "0"], "limit is 0"),
        (["shakespeare", "perplexitty", "TEXT"], "did you mean perplexity?"),
        (["shakespeare", "translation", "TEXT"], "cannot translate"),
        (["translator", "translation", "TEXT"], "name the file with the other language's lines (the setting target)"),
        (["sentiment", "classification", "WORDS"], "(the setting text, the setting label)"),
    ],
)
def test_mistakes_are_one_line(arguments, message, files, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stand_ins = {"TEXT": str(files / "text.txt.gz"), "WORDS": str(files / "words.tsv")}
    assert main(["eval", *(stand_ins.get(a, a) for a in arguments)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said
