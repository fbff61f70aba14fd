"""Templates, and what fills a blank."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import heedful
from heedful.models.base import Batch
from heedful.observe import charts, fill_report
from heedful.observe.fill import fill_template
from heedful.observe.template import MAX_ALTERNATIVES, MAX_CHARACTERS, MAX_SENTENCES, parse_template
from heedful.text.tokenizer import Tokenizer
from support.tiny import tiny

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2-tokenizer"


# --- templates -------------------------------------------------------------------------------------------------------


def test_every_combination_is_a_sentence():
    template = parse_template("In [1908|2018], [he|she] was employed as a _.")
    assert template.slots == (("1908", "2018"), ("he", "she"))
    assert [str(s) for s in template.sentences] == [
        "In 1908, he was employed as a _.",
        "In 1908, she was employed as a _.",
        "In 2018, he was employed as a _.",
        "In 2018, she was employed as a _.",
    ]
    assert template.sentences[1].choices == ("1908", "she") and template.sentences[1].name == "1908 / she"
    assert template.sentences[0].with_word("clerk") == "In 1908, he was employed as a clerk."


def test_blanks_and_plain_characters():
    assert str(parse_template("a ____ b").sentences[0]) == "a _ b"
    assert parse_template("snake_case is _").sentences[0].before == "snake_case is "
    assert parse_template(r"a \[b\|c\] \_ \\ _").sentences[0].before == r"a [b|c] _ \ "
    assert [s.before for s in parse_template("[|not ]so _").sentences] == ["so ", "not so "]
    assert parse_template("_").sentences[0] == parse_template("[ a|b]_").sentences[0].__class__("", "", ())


@pytest.mark.parametrize("blank", ["_", "___", "[MASK]", "[mask]", "<mask>"])
def test_mask_tokens_of_any_model_are_blanks(blank: str, bert):
    (sentence,) = parse_template(f"In Texas, they like to buy {blank}.").sentences
    assert (sentence.before, sentence.after) == ("In Texas, they like to buy ", ".")
    assert parse_template(f"{blank} is [a|b].", {"tiny"}.__contains__).sentences[1].after == " is b."
    with pytest.raises(ValueError, match="one blank, not 2"):
        parse_template(f"{blank} and _")
    assert bert.fill(f"the cat sat on the {blank}", n=3).words == bert.fill("the cat sat on the _", n=3).words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a|", "opens at character 1 is not closed"),
        ("x [a|b _", "opens at character 3 is not closed"),
        ("[" + "|".join(map(str, range(50))) + "] _", f"more than {MAX_ALTERNATIVES} alternatives"),
        ("_" + "x" * 1_000_000, f"at most {MAX_CHARACTERS:,}"),
        ("[" * 4999, "bracket inside a bracket"),
        ("[a|b]" * 7 + " _", f"128 sentences: a template may mean {MAX_SENTENCES}"),
        ("no blank", "one blank, not 0"),
        ("_ and _", "one blank, not 2"),
        ("a ] _", "closes nothing"),
        ("[a] _", "one alternative"),
        ("[a|a] _", "twice"),
        ("  ", "empty"),
    ],
)
def test_mistakes_are_told_with_the_limit(text: str, message: str):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        parse_template(text)


def test_a_first_bracket_may_name_models():
    models = ("bert-books", "tiny", "shakespeare")
    template = parse_template("[tiny|shakespeare]: [he|she] was _.", models.__contains__, models)
    assert template.models == ("tiny", "shakespeare") and template.slots == (
        ("tiny", "shakespeare"),
        ("he", "she"),
    )
    assert [s.label for s in template.sentences] == [
        "tiny: he was _.", "tiny: she was _.", "shakespeare: he was _.", "shakespeare: she was _."
    ]  # fmt: skip
    assert template.sentences[3].name == "shakespeare / she"
    assert [s.model for s in template.for_model("tiny").sentences] == ["tiny", "tiny"]
    for text in (" [tiny|shakespeare] _", "[big|small] feet _", "a [tiny|shakespeare] _"):
        assert parse_template(text, models.__contains__, models).models == ()
    with pytest.raises(ValueError, match=r"names the model tiny, and 'shakspeare' is none \(near it: shakespeare\)"):
        parse_template("[tiny|shakspeare] _", models.__contains__, models)
    with pytest.raises(ValueError, match="names a model twice"):
        parse_template("[tiny| tiny] _", models.__contains__, models)
    with pytest.raises(ValueError, match="character 22"):  # as it stands in the whole
        parse_template("[tiny|bert-books]: a ] _", models.__contains__, models)


# --- masked models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert():
    return heedful.load("bert-books", dtype=torch.float32)


@pytest.fixture(scope="module")
def shakespeare():
    return heedful.load("shakespeare", dtype=torch.float32)


def test_a_masked_model_says_what_its_logits_say(bert):
    found = bert.fill("the [man|woman] took off _ hat .", n=40)
    assert found.method == "masked" and len(found.words) >= 40
    tokenizer = bert.tokenizer
    for i, subject in enumerate(("man", "woman")):
        ids = tokenizer.encode(f"the {subject} took off [MASK] hat .", add_special=True, allow_special=True)
        with torch.no_grad():
            logits = bert.model(torch.tensor([ids])).logits[0, ids.index(tokenizer.mask_id)]
        chances = logits.softmax(dim=-1)
        for word, p in zip(found.words, found.probabilities[i].tolist(), strict=True):
            assert p == pytest.approx(float(chances[tokenizer.id(word)]), rel=1e-4)
        best = [w for w, _ in found.top(i, 5)]
        order = chances.argsort(descending=True).tolist()
        whole = [tokenizer.token(t) for t in order if tokenizer.token(t).isalnum()]
        assert best == whole[:5]
    his, her = (found.words.index(w) for w in ("his", "her"))
    ratio = found.log_ratio()
    assert ratio[his] > ratio[her]  # the corpus is old


def test_words_of_several_pieces_follow_the_chain_rule(bert):
    word = "uncomprehending"
    pieces = bert.tokenizer.encode(word)
    assert len(pieces) > 2
    found = bert.fill("the _ sea .", words=[word, "old"])
    assert found.method == "pieces"
    total = 0.0
    frame = lambda inner: bert.tokenizer.encode("the", add_special=True)[:-1] + inner  # noqa: E731
    after = bert.tokenizer.encode("sea .", add_special=True)[1:]
    for i, piece in enumerate(pieces):
        ids = frame([*pieces[:i], *[bert.tokenizer.mask_id] * (len(pieces) - i)]) + after
        with torch.no_grad():
            total += float(bert.model(torch.tensor([ids])).logits[0, 2 + i].log_softmax(-1)[piece])
    assert float(found.logprobs[0, 0]) == pytest.approx(total, abs=1e-4)


def test_scores_of_association_add_up(bert):
    found = bert.fill("the [man|woman] of [london|america] was a good _ .", n=50)
    assert found.logprobs.shape == (4, len(found.words))
    assert torch.allclose(found.against_mean().sum(dim=0), torch.zeros(len(found.words)), atol=1e-4)
    sexes = found.association(0)
    assert sexes.shape == (2, len(found.words)) and torch.allclose(sexes[0], -sexes[1], atol=1e-4)
    by_hand = (found.logprobs[0] + found.logprobs[1]) / 2 - found.logprobs.mean(dim=0)
    assert torch.allclose(sexes[0], by_hand, atol=1e-5)
    extremes = found.extremes(sexes[0], 3)
    assert len(extremes) == 6 and extremes[0][1] == pytest.approx(float(sexes[0].max()))


# --- causal models ---------------------------------------------------------------------------------------------------


def log_p(model, ids, begin) -> float:
    with torch.no_grad():
        told = model(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    return sum(float(told[t - 1, ids[t]]) for t in range(begin, len(ids)))


def test_a_causal_model_is_asked_for_what_comes_next(shakespeare):
    found = shakespeare.fill("My lord, I _", words=["love", "hate"])
    assert found.method == "next"
    before = shakespeare.tokenizer.encode("My lord, I")
    for word, p in zip(found.words, found.logprobs[0].tolist(), strict=True):
        # The space before the word is common to all of them, and given.
        ids = shakespeare.tokenizer.encode(f"My lord, I {word}")
        assert p == pytest.approx(log_p(shakespeare.model, ids, len(before)), abs=1e-3)


def test_what_follows_the_blank_counts_where_words_follow(shakespeare):
    words = ["love", "hate", "see"]
    found = shakespeare.fill("My [lord|lady], I _ thee well", words=words)
    assert found.method == "both"
    assert torch.allclose(found.probabilities.sum(dim=-1), torch.ones(2), atol=1e-5)
    joint = [log_p(shakespeare.model, shakespeare.tokenizer.encode(f"My lady, I {w} thee well"), 8) for w in words]
    expected = torch.tensor(joint).log_softmax(dim=-1)
    assert torch.allclose(found.logprobs[1], expected, atol=1e-3)
    plain = fill_template(
        shakespeare.model, shakespeare.tokenizer, "My lady, I _ thee well", words=words, rescore=False
    )
    assert plain.method == "next" and not torch.allclose(plain.logprobs[0], found.logprobs[1])


@pytest.mark.skipif(not GPT2.exists(), reason="the tokenizer of GPT-2 is not in ../shared/data")
def test_candidates_of_byte_pairs_are_words_with_their_space():
    tokenizer = Tokenizer.from_folder(GPT2)
    model = tiny("gpt", vocab_size=len(tokenizer)).eval()
    found = fill_template(model, tokenizer, "In [Texas|New York], they like to buy _.", n=20)
    assert found.method == "next" and 20 <= len(found.words) <= 40
    assert all(word == word.strip() and any(c.isalnum() for c in word) for word in found.words)
    ids = [tokenizer.encode(" " + word) for word in found.words]
    with torch.no_grad():
        row = tokenizer.encode("In Texas, they like to buy")
        told = model(Batch(torch.tensor([row]))).logits[0, -1].log_softmax(dim=-1)
    single = [i for i, pieces in enumerate(ids) if len(pieces) == 1]
    assert len(single) > len(ids) // 2
    for i in single:
        assert float(found.logprobs[0, i]) == pytest.approx(float(told[ids[i][0]]), abs=1e-3)


def test_nothing_before_the_blank():
    loaded = heedful.load("shakespeare", dtype=torch.float32)
    with pytest.raises(ValueError, match="nothing stands before the blank"):
        loaded.fill("_ is a word", words=["This", "That"])


def test_what_cannot_be_filled(bert, shakespeare):
    with pytest.raises(ValueError, match="cannot fill"):
        heedful.load("digits-vit").fill("a _")
    with pytest.raises(ValueError, match="cannot fill in a blank"):
        fill_template(tiny("t5"), bert.tokenizer, "a _")
    with pytest.raises(ValueError, match="words to compare are empty"):
        bert.fill("a _", words=[" "])
    with pytest.raises(ValueError, match="at most 1000"):
        bert.fill("a _", words=[f"w{i}" for i in range(1001)])
    with pytest.raises(ValueError, match="no token for"):
        bert.fill("a _", words=["日本"])
    with pytest.raises(ValueError, match="n is 0"):
        bert.fill("a _", n=0)
    with pytest.raises(ValueError, match="shorten the text"):
        bert.fill("man " * 1000 + "_")
    with pytest.raises(ValueError, match="sees what follows"):
        fill_template(bert.model, bert.tokenizer, "a _", rescore=True)


# --- several models --------------------------------------------------------------------------------------------------


def test_models_are_compared_by_the_words_that_all_know(bert, shakespeare):
    tiny = heedful.load("tiny", dtype=torch.float32)
    found = bert.fill("[tiny|shakespeare]: My [lord|king], _", n=5)  # letters, both of them
    assert [s.model for s in found.sentences] == ["tiny"] * 2 + ["shakespeare"] * 2
    assert found.method == "next" and 5 <= len(found.words) <= 20
    for i, loaded in enumerate((tiny, tiny, shakespeare, shakespeare)):
        alone = loaded.fill(f"My {('lord', 'king')[i % 2]}, _", n=None)
        known = dict(zip(alone.words, alone.logprobs[0].tolist(), strict=True))
        assert found.logprobs[i].tolist() == pytest.approx([known[word] for word in found.words], abs=1e-4)
    models = found.association(0)  # the models are the first bracket
    assert torch.allclose(models[0], found.logprobs[:2].mean(dim=0) - found.mean(), atol=1e-5)


def test_a_model_of_letters_spells_the_words_of_the_other(bert, shakespeare):
    found = bert.fill("[bert-books|shakespeare]: My lord, _", n=5)
    assert found.method == "mixed" and all(word.isalpha() for word in found.words)
    best = [word for word, _ in bert.fill("My lord, _", n=None).top(0, 20)]
    assert 1 <= len(found.words) <= 5 and {*found.words} <= {*best}
    alone = shakespeare.fill("My lord, _", words=found.words)
    assert torch.allclose(found.logprobs[1], alone.logprobs[0], atol=1e-4)
    everything = bert.fill("[bert-books|shakespeare]: My lord, _", n=None)
    assert len(everything.words) == 200  # each is a row of its own


def test_models_are_compared_with_what_follows_the_blank(bert, shakespeare):
    words = ["love", "hate", "see"]
    found = bert.fill("[shakespeare|bert-books]: My lady, I _ thee well", words=words)
    assert found.method == "both"
    alone = shakespeare.fill("My lady, I _ thee well", words=words)
    assert torch.allclose(found.logprobs[0], alone.logprobs[0], atol=1e-4)
    masked = bert.fill("My lady, I _ thee well", words=words)  # made probabilities among these words, as the others are
    assert torch.allclose(found.logprobs[1], masked.logprobs[0].log_softmax(dim=-1), atol=1e-4)
    free = bert.fill("[shakespeare|bert-books]: My lady, I _ thee well", n=5)
    assert free.method == "both" and torch.allclose(free.probabilities.sum(dim=-1), torch.ones(2), atol=1e-5)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_reports_hold_the_numbers_and_no_markup(bert, tmp_path):
    found = bert.fill("<b>the</b> [man|<script>alert(1)</script>] took _ hat .", words=["his", "her", "=1+1"])
    for ending in (".html", ".csv", ".svg"):
        fill_report.save_report(found, "bert-books", tmp_path / f"r{ending}")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "src=" not in page
    assert "<svg" in page and f"{100 * found.top(0, 1)[0][1]:.3f} %" in page
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8"))))
    assert {row["word"] for row in rows} == {"his", "her", "'=1+1"}
    row = next(row for row in rows if row["word"] == "his")
    assert float(row["p(man)"]) == pytest.approx(float(found.probabilities[0, 0]), rel=1e-4)
    assert float(row[next(k for k in row if k.startswith("log ratio"))]) == pytest.approx(
        float(found.log_ratio()[0]), abs=1e-4
    )
    assert "<script>" not in (tmp_path / "r.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="written as"):
        fill_report.save_report(found, "x", tmp_path / "r.doc")
    assert "his" in fill_report.report_text(found) and math.isfinite(float(found.mean()[0]))


def test_charts_have_the_natural_logarithms_of_the_report(bert):
    """A log ratio of 0.69 is twice as likely: in the tables of a report, and in its charts."""
    found = bert.fill("the [man|woman] is _ .", words=["good", "bad", "old"])
    both, difference = charts.fill_chart(found).axes
    assert "log₁₀" not in both.get_xlabel() + difference.get_ylabel()
    a, b = found.logprobs.tolist()
    np.testing.assert_allclose(both.collections[0].get_offsets(), list(zip(b, a, strict=True)), rtol=1e-5)
    ratios = np.asarray(difference.collections[0].get_offsets())[:, 1]
    np.testing.assert_allclose(ratios, found.log_ratio().tolist(), rtol=1e-4, atol=1e-6)
