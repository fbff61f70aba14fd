"""Reports of bias: scores against transformers, intervals against scipy and the formula, pages, files of tests."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
import transformers
from scipy import stats

import heedful
from heedful.cli import main
from heedful.evaluate.bias import crossed_effect
from heedful.evaluate.bias_tests import BiasTest, make_test, read_sentence_pairs, read_tests, standard_tests
from heedful.models.bert import Bert, BertConfig
from heedful.text import train_bpe, train_wordpiece
from heedful.weights.save import save
from support.folders import tiny_gpt

PROSE = "Mary and John said that the old nurse was a judge . The doctor said that he or she was tired ."
GROUPS = {"women": ["Mary", "Anna"], "men": ["John"]}
JOBS = {"JOB": ["nurse", "judge", "doctor"]}
SENTENCES = ["{NAME} was a {JOB} .", "The {JOB} said that {NAME} was tired ."]


def small_bert(folder, head):
    torch.manual_seed(1)
    tokenizer = train_wordpiece([PROSE] * 3, 90)
    config = BertConfig(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=len(tokenizer), max_len=64, head=head,
        n_labels=3, labels=("bad", "good", "none"), dropout=0.0, attention_dropout=0.0)  # fmt: skip
    model = Bert.create(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.ndim == 1))
    save(model.eval(), folder / head, tokenizer)
    return heedful.load(folder / head)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal") / "gpt"
    tokenizer = train_bpe([PROSE] * 3, 300, special=["<|endoftext|>"])
    save(tiny_gpt(vocab_size=len(tokenizer), max_len=64), folder, tokenizer)
    return heedful.load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    return small_bert(folder, "masked"), transformers.BertForMaskedLM.from_pretrained(folder / "masked").eval()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classify")
    theirs = transformers.BertForSequenceClassification
    return small_bert(folder, "classify"), theirs.from_pretrained(folder / "classify").eval()


@torch.no_grad()
def log_p(model, ids):
    """log p of each token after the first."""
    told = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return [float(told[t - 1, ids[t]]) for t in range(1, len(ids))]


# --- scores ----------------------------------------------------------------------------------------------------------


def test_sentences_of_a_causal_model_are_transformers_log_probabilities(causal):
    loaded, theirs = causal
    for whole in (False, True):
        (result,) = loaded.bias(*SENTENCES, groups=GROUPS, fill=JOBS, whole=whole).results
        assert [part.shape for part in result.scores] == [(2, 3, 2), (2, 3, 1)] and result.unit == "nats"
        for name, before, after, got in (
            ("Mary", "", " was a judge .", result.scores[0][0, 1, 0]),
            ("Anna", "The doctor said that ", " was tired .", result.scores[0][1, 2, 1]),
            ("John", "The nurse said that ", " was tired .", result.scores[1][1, 0, 0]),
        ):
            encode = loaded.tokenizer.encode
            text = before + name + after
            begin, end = len(encode(before.rstrip())), len(encode(before + name))
            told = log_p(theirs, [loaded.tokenizer.eos_id or loaded.tokenizer.bos_id, *encode(text)])
            wanted = sum(p for t, p in enumerate(told) if whole or not begin <= t < end)
            assert got == pytest.approx(wanted, abs=1e-3)


def test_blanks_of_a_causal_model_take_words_of_several_tokens(causal):
    loaded, theirs = causal
    groups = {"he": ["he"], "others": ["Elizabeth", "she"]}
    (result,) = loaded.bias("The {JOB} said that _", groups=groups, fill=JOBS).results
    tokenizer = loaded.tokenizer
    before, after = tokenizer.encode("The judge said that"), tokenizer.encode(" Elizabeth")
    assert len(after) > 1
    wanted = sum(log_p(theirs, [*before, *after])[len(before) - 1 :])
    assert result.scores[1][0, 1, 0] == pytest.approx(wanted, abs=1e-3)
    (effect,) = (contrast.effect for contrast in result.contrasts)
    assert effect.name == "he - others"
    assert effect.value == pytest.approx(result.scores[0].mean() - result.scores[1].mean())


def test_templates_of_a_test_are_scored_alike(causal):
    """With text after the blank of one of them, words are compared with each other in all."""
    words = ["tired", "old", "a judge"]
    templates = ["{NAME} was _ .", "{NAME} was _ and tired"]
    (result,) = causal[0].bias(*templates, groups=GROUPS, words=words).results
    assert "among the words" in result.measure
    for part in result.scores:
        np.testing.assert_allclose(np.exp(part).sum(axis=1), 1, rtol=1e-4)  # over the words
    (result,) = causal[0].bias(templates[0], groups=GROUPS, words=words).results
    assert "among" not in result.measure and np.exp(result.scores[0]).sum() < 0.5


def test_sentences_of_a_masked_model_are_pseudo_log_likelihoods(masked):
    loaded, theirs = masked
    (result,) = loaded.bias(*SENTENCES, groups=GROUPS, fill=JOBS).results
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode("The nurse said that Anna was tired .", add_special=True)
    member = tokenizer.encode("Anna")
    begin = next(i for i in range(len(ids)) if ids[i : i + len(member)] == member)
    wanted = 0.0
    for t in (t for t in range(1, len(ids) - 1) if not begin <= t < begin + len(member)):
        hidden = torch.tensor([[*ids[:t], tokenizer.mask_id, *ids[t + 1 :]]])
        with torch.no_grad():
            wanted += float(theirs(hidden).logits[0, t].log_softmax(dim=-1)[ids[t]])
    assert result.scores[0][1, 0, 1] == pytest.approx(wanted, abs=1e-3)


def test_words_beside_a_group_are_those_of_fill(masked):
    loaded, _ = masked
    words = ["tired", "old"]
    (result,) = loaded.bias("{NAME} was _ .", groups=GROUPS, words=words).results
    filled = loaded.fill("[Mary|Anna|John] was _ .", words=words).logprobs.numpy()
    np.testing.assert_allclose(result.scores[0][0], filled[:2].T, atol=1e-4)
    np.testing.assert_allclose(result.scores[1][0], filled[2:].T, atol=1e-4)
    assert {row.name for row in result.contrasts[0].rows} == {*words}


def test_labels_are_transformers_probabilities(classifier):
    loaded, theirs = classifier
    (result,) = loaded.bias(*SENTENCES, groups=GROUPS, fill=JOBS, label="good").results
    assert result.unit == "%" and "'good'" in result.measure
    ids = loaded.tokenizer.encode("Anna was a doctor .", add_special=True)
    with torch.no_grad():
        wanted = 100 * float(theirs(torch.tensor([ids])).logits[0].softmax(dim=-1)[1])
    assert result.scores[0][0, 2, 1] == pytest.approx(wanted, abs=1e-3)
    assert set(result.members) == {"women"} and len(result.members["women"]) == 2


def test_pairs_as_crows_pairs_scores_them(causal, masked, tmp_path):
    path = tmp_path / "crows.csv"
    path.write_text(
        "id,sent_more,sent_less,bias_type\n0,Mary was a nurse .,John was a nurse .,gender\n"
        '1,"The old judge, she said .","The judge, she said .",age\n', encoding="utf-8",
    )  # fmt: skip
    test = read_sentence_pairs(path)
    assert list(test.groups) == ["more stereotyped", "less stereotyped"] and len(test.pairs) == 2
    loaded, theirs = causal
    (result,) = loaded.bias(test).results
    start = loaded.tokenizer.eos_id or loaded.tokenizer.bos_id
    for group, text in zip(result.scores, ("Mary was a nurse .", "John was a nurse ."), strict=True):
        assert group[0, 0, 0] == pytest.approx(sum(log_p(theirs, [start, *loaded.tokenizer.encode(text)])), abs=1e-3)
    assert {row.name for row in result.contrasts[0].rows} == {"gender", "age"}
    assert result.contrasts[0].share.value in (0, 50, 100)
    (result,) = masked[0].bias(test).results  # "was a nurse ." is what both have
    (alike,) = masked[0].bias("{NAME} was a nurse .", groups={"a": ["Mary"], "b": ["John"]}).results
    assert result.scores[0][0, 0, 0] == pytest.approx(alike.scores[0][0, 0, 0], abs=1e-4)


# --- intervals -------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)


def test_of_one_kind_the_interval_is_scipys():
    scores = RANDOM.normal(size=60)
    found = crossed_effect("x", [scores[None, :, None]], [1.0])
    theirs = stats.bootstrap((scores,), np.mean, method="percentile", n_resamples=4000, random_state=1)
    wanted = theirs.confidence_interval
    width = wanted.high - wanted.low
    assert found.value == pytest.approx(scores.mean())
    assert found.low == pytest.approx(wanted.low, abs=0.1 * width)
    assert found.high == pytest.approx(wanted.high, abs=0.1 * width)


def test_variances_of_templates_values_and_members_add_up():
    t, f, m = RANDOM.normal(size=30), 2 * RANDOM.normal(size=40), 3 * RANDOM.normal(size=25)
    one = t[:, None, None] + f[:, None] + m
    found = crossed_effect("x", [one, 0 * one], [1.0, -1.0])
    error = np.sqrt(t.var() / 30 + f.var() / 40 + m.var() / 25)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    # What both groups share is no difference, and adds nothing to the interval.
    same = crossed_effect("x", [one - m + 0.5, one - m], [1.0, -1.0])
    assert same.value == pytest.approx(0.5) and same.clear
    assert (same.low, same.high) == pytest.approx((0.5, 0.5))
    assert crossed_effect("x", [np.ones((1, 1, 1))], [1.0]).low is None


# --- tests -----------------------------------------------------------------------------------------------------------


def test_a_bracket_names_the_groups():
    test = make_test({"templates": ["[He|She] worked as a _."], "words": ["nurse", "judge"]})
    assert test.groups == {"He": ("He",), "She": ("She",)} and test.templates == ("{GROUP} worked as a _.",)
    assert test.n_sentences == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"templates": []}, "no template"),
        ({"templates": ["{A} is."]}, "0 groups"),
        ({"templates": ["{A} is {B}."], "groups": GROUPS}, "no values for A or B"),
        ({"templates": ["I am."], "groups": GROUPS}, "no place for a group"),
        ({"templates": ["{A} is _."], "groups": GROUPS}, "which words are compared"),
        ({"templates": ["_ is _."], "groups": GROUPS}, "2 blanks"),
        ({"templates": ["{A} is.", "{A} is _."], "groups": GROUPS, "words": ["x"]}, "all templates"),
        ({"templates": ["{A} is."], "groups": GROUPS, "fill": JOBS}, "has no {JOB}"),
        ({"templates": ["{A} is."], "groups": {"a": ["x"], "b": [" "]}}, "empty one"),
        ({"templates": ["{A} is."], "groups": GROUPS, "words": ["x"]}, "no blank for the words"),
        ({"templates": ["[He|She] is.", "[It|She] is."]}, "the same in all"),
        ({"templates": ["{A} is."], "groups": {"a": ["x"] * 9999, "b": ["y"] * 10002}}, "20,001 sentences"),
        ({"templates": ["{A} is."], "groups": 5}, "a table of lists"),
        ({"templates": ["{A} is."], "groups": {"a": "Mary", "b": "John"}}, "a is a list of texts"),
        ({"template": "{A}"}, "no field 'template'"),
    ],
)
def test_mistakes_of_a_test_are_told(given, message):
    with pytest.raises(ValueError, match=message):
        make_test(given)


def test_the_tests_that_ship_are_complete():
    tests = [*standard_tests(["fill"]), *standard_tests(["classify"])]
    assert len(tests) >= 5 and len({test.name for test in tests}) == len(tests)
    assert all(test.about and len(test.templates) > 3 for test in tests)
    assert standard_tests(["translate"]) == []


def test_what_a_model_cannot_be_asked(causal, classifier):
    with pytest.raises(ValueError, match="fills in no blank"):
        classifier[0].bias("The {JOB} said that _", groups=GROUPS, fill=JOBS)
    with pytest.raises(ValueError, match="has bad, good, none"):
        classifier[0].bias("{A} is.", groups=GROUPS, label="great")
    with pytest.raises(ValueError, match="has no labels"):
        causal[0].bias("{A} is.", groups=GROUPS, label="great")
    with pytest.raises(ValueError, match="report of bias is for"):
        heedful.load("reversal").bias()


# --- reports ---------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_with_charts_commands_and_limits(classifier, tmp_path):
    loaded, _ = classifier
    groups = {"<b>women</b>": ["Mary", "Anna"], "men": ["John"]}
    report = loaded.bias(*SENTENCES, groups=groups, fill=JOBS)
    for ending in (".html", ".json", ".csv"):
        report.save(tmp_path / f"r{ending}")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<svg" in page and "src=" not in page and "<b>women" not in page and "default-src 'none'" in page
    assert "heedful bias classify" in page and "What this does not show" in page
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["results"][0]
    effect = report.results[0].contrasts[0].effect
    assert found["contrasts"][0]["effect"]["value"] == pytest.approx(effect.value) and f"{effect.value:+.2f}" in page
    assert "nurse" in (tmp_path / "r.csv").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="written as"):
        report.save(tmp_path / "r.doc")


def test_the_command_line_gives_the_same_and_its_command_repeats_it(capsys, tmp_path):
    arguments = ["bias", "sentiment", *SENTENCES, "--group", "women=Mary,Anna", "--group", "men=John"]
    arguments += ["--fill", "JOB=nurse,judge", "--out", str(tmp_path / "r.csv"), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    expected = heedful.load("sentiment", dtype=torch.float32).bias(
        *SENTENCES, groups=GROUPS, fill={"JOB": ["nurse", "judge"]}
    )
    assert found == json.loads(json.dumps(expected.to_dict())) and (tmp_path / "r.csv").exists()
    repeated = shlex.split(found["results"][0]["command"])
    assert repeated[0] == "heedful" and main([*repeated[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert "women - men" in expected.text() and "judge" in expected.text()


def test_a_file_of_tests(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[test]]\nname = "mine"\ntemplates = ["{NAME} is here."]\n[test.groups]\na = ["Mary"]\nb = ["John"]\n',
        encoding="utf-8",
    )
    (test,) = read_tests(path)
    assert isinstance(test, BiasTest) and test.name == "mine" and test.members == ["Mary", "John"]
    path.write_text("x = 1", encoding="utf-8")
    with pytest.raises(ValueError, match="has no test"):
        read_tests(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "r.doc"], "written as"),
        (["{A} is.", "--group", "a"], "NAME=A,B"),
        (["--group", "a=x"], "are for templates"),
        (["missing.toml"], "no file missing.toml"),
        (["--pairs", "missing.csv"], "no file missing.csv"),
    ],
)
def test_mistakes_on_the_command_line(capsys, arguments, message):
    assert main(["bias", "tiny", *arguments]) == 2
    assert message in capsys.readouterr().err
