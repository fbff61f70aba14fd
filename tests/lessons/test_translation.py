"""B6: what a translator says and where it looks, beam search and BLEU by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("translation")


def test_b6_what_the_translator_says(lesson):
    names = lesson.names
    said = dict(zip(names["SENTENCES"], names["greedy"], strict=True))
    assert [text == names["SENTENCES"][german] for german, text in said.items()] == [True] * 7 + [False] * 5
    assert said["Heute kauft die alte Frau Brot auf dem Markt."].endswith("at the market today.")
    assert said["Drei Musiker spielen auf der Straße Gitarre."].endswith("on the street.")
    tokenizer = names["translator"].tokenizer
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" Steuererklärung")] == [" Steuer", "er", "kl", "är", "ung"]
    assert "wheelclip" in said["Anna und Paul streiten über die Steuererklärung."]
    assert said["Es regnet in Strömen."] == "It's raining."
    assert "Die Kinder werden morgen im See schwimmen." in lesson.text.splitlines()  # from English


def test_b6_beam_search_by_hand_is_heedfuls(lesson):
    names = lesson.names
    assert names["by_hand"] == names["beamed"]
    changed = [i for i, said in enumerate(names["greedy"]) if said != names["beamed"][i]]
    assert changed == [10, 11]  # with rare words
    assert "greedy: a dog, 0.20    best: the dog, 0.36" in lesson.text


def test_b6_bleu_by_hand_is_sacrebleus(lesson):
    names = lesson.names
    assert names["score"] == pytest.approx(names["official"].score, abs=1e-6)
    assert [p * 100 for p in names["precisions"]] == pytest.approx(names["official"].precisions)
    assert names["by_part"]["seven we would have said"] == pytest.approx(100)
    assert names["by_part"]["wrong"] < names["by_part"]["right in other words"] < 80


def test_b6_the_alignment_follows_the_words(lesson):
    looked, written, read = (lesson.names[name] for name in ("looked", "written", "read"))
    pairs = {"children": "Kinder", "will": "werden", "swim": "schwimmen", "lake": "See", "tomorrow": "morgen"}
    for english, german in pairs.items():
        assert looked[written.index(english), read.index(german)] > 0.8
    assert read[looked[written.index("the")].argmax()] == "See"
    assert read[looked[written.index("end")].argmax()] == "Die" and looked[written.index("end")].max() < 0.6


def extended(totals, log_p, width, *, mix=torch.add):
    best, places = mix(totals[:, None], log_p).flatten().topk(width)
    return best, places // log_p.shape[1], places % log_p.shape[1]


def best_of_each(totals, log_p, width):
    best, rows = (totals + log_p.amax(1)).sort(descending=True)
    return best, rows, log_p.argmax(1)[rows]


def raw_places(totals, log_p, width):
    best, places = (totals[:, None] + log_p).flatten().topk(width)
    return best, places // log_p.shape[1], places


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("mod V", raw_places),
        ("each beginning has one", best_of_each),
        ("no part", lambda t, p, w: extended(0 * t, p, w)),
        ("added, not multiplied", lambda t, p, w: extended(t, p, w, mix=torch.mul)),
        ("rows and tokens are swapped", lambda t, p, w: [extended(t, p, w)[i] for i in (0, 2, 1)]),
        ("not sorted", lambda t, p, w: [x.flip(0) for x in extended(t, p, w)]),
        ("three tensors", lambda t, p, w: extended(t, p, w)[0]),
        ("extend_beams: right", extended),
    ],
)
def test_wrong_beams_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="extend_beams")


def ngrams(text, n):
    return Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (
            "not clipped",
            lambda s, w, n: sum(c for g, c in ngrams(s, n).items() if g in ngrams(w, n)) / (len(s) - n + 1),
        ),
        ("reference's pieces", lambda s, w, n: (ngrams(s, n) & ngrams(w, n)).total() / ngrams(w, n).total()),
        ("n is ignored", lambda s, w, n: (ngrams(s, 1) & ngrams(w, 1)).total() / len(s)),
        ("len - n + 1", lambda s, w, n: (ngrams(s, n) & ngrams(w, n)).total() / len(s)),
        ("counted once", lambda s, w, n: len(set(ngrams(s, n)) & set(ngrams(w, n))) / len(s)),
        ("clipped_precision: right", lambda s, w, n: (ngrams(s, n) & ngrams(w, n)).total() / ngrams(s, n).total()),
    ],
)
def test_a_wrong_precision_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="clipped_precision")
