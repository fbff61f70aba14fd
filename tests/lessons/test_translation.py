"""B5, B6: label smoothing and its optimum, warm-up, a Transformer that learns to translate, beam search, BLEU."""

from __future__ import annotations

import math

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("translation")


def test_label_smoothing_has_its_optimum_where_the_formula_says(lesson):
    names = lesson.names
    assert names["V"] == 80
    assert names["found"] == pytest.approx(0.9 + 0.1 / 80, abs=1e-3)
    assert names["gap"] == pytest.approx(math.log(0.90125 / 0.00125), abs=1e-2)
    assert names["floor"] == pytest.approx(0.75, abs=0.005)  # of 80 words
    of_37000 = torch.full((37000,), 0.1 / 37000, dtype=torch.float64)
    of_37000[0] += 0.9
    assert torch.special.entr(of_37000).sum() == pytest.approx(1.38, abs=0.005)
    assert "by hand 7.0073, PyTorch 7.0073, heedful 7.0073" in lesson.text


def test_the_schedule_is_the_papers(lesson):
    assert lesson.names["peak"] == pytest.approx(7e-4, rel=0.01)
    for step, rate in zip((1, 1000, 4000, 16000), lesson.names["ours"], strict=True):
        assert rate == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))


def test_b6_warm_up_makes_the_difference(lesson):
    names = lesson.names
    assert len(names["training"]) == 200 and len(names["held_out"]) == 184
    seen = {" ".join(source) for source, _ in names["training"]}
    assert not seen & {" ".join(source) for source, _ in names["held_out"]}
    assert names["exact"]["warm-up"] == 1 and names["exact"]["none"] < 0.1
    assert names["sure"]["warm-up"] == pytest.approx(0.9, abs=0.03)
    assert names["runs"]["warm-up"][1][-1] == pytest.approx(names["floor"], abs=0.05)


def test_a_smaller_rate_needs_no_warm_up_here(lesson):
    with torch.random.fork_rng():
        _, losses = lesson.names["train"](0.003, warmup=0)
    assert losses[-1] == pytest.approx(lesson.names["floor"], abs=0.1)


def test_b6_what_the_translator_says(lesson):
    names = lesson.names
    said = dict(zip(names["SENTENCES"], names["greedy"], strict=True))
    assert [text == names["SENTENCES"][german] for german, text in said.items()] == [True] * 6 + [False] * 6
    assert said["Heute kauft die alte Frau Brot auf dem Markt."].endswith("at the market today.")
    assert said["Drei Musiker spielen auf der Straße Gitarre."].endswith("on the street.")
    assert "father" not in said["Der Junge will mit seinem Vater ein Boot bauen."]


def test_b6_beam_search_by_hand_is_heedfuls(lesson):
    names = lesson.names
    assert names["by_hand"] == names["beamed"]
    changed = [i for i, said in enumerate(names["greedy"]) if said != names["beamed"][i]]
    assert len(changed) == 2 and min(changed) >= 9  # of the last three
    assert "greedy: a dog, 0.20    best: the dog, 0.36" in lesson.text


def test_b6_bleu_by_hand_is_sacrebleus(lesson):
    names = lesson.names
    assert names["score"] == pytest.approx(names["official"].score, abs=1e-6)
    assert [p * 100 for p in names["precisions"]] == pytest.approx(names["official"].precisions)
    assert names["by_part"]["six we would have said"] == pytest.approx(100)
    assert names["by_part"]["wrong"] < names["by_part"]["right in other words"] < 80


def test_b6_the_alignment_follows_the_words(lesson):
    looked, written, read = (lesson.names[name] for name in ("looked", "written", "read"))
    pairs = {"children": "Kinder", "will": "werden", "swim": "schwimmen", "lake": "See", "tomorrow": "morgen"}
    for english, german in pairs.items():
        assert looked[written.index(english), read.index(german)] > 0.8
    assert read[looked[written.index("The")].argmax()] == "."


def smoothed(logits, targets, eps, *, right=None, rest=None):
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(1, targets[:, None])[:, 0]
    parts = (1 - eps if right is None else right) * picked
    return -(parts + (eps * log_p.mean(-1) if rest is None else rest(log_p, picked, eps))).mean()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("where is eps", lambda x, y, e: smoothed(x, y, 0)),
        ("V - 1 words", lambda x, y, e: smoothed(x, y, e, rest=lambda p, t, e: e * (p.sum(-1) - t) / 8)),
        ("own share", lambda x, y, e: smoothed(x, y, e, rest=lambda p, t, e: e * (p.sum(-1) - t) / 9)),
        ("not eps / V", lambda x, y, e: smoothed(x, y, e, rest=lambda p, t, e: e * p.sum(-1))),
        ("swapped", lambda x, y, e: smoothed(x, y, 1 - e)),
        ("keeps all", lambda x, y, e: smoothed(x, y, e, right=1)),
        ("sign", lambda x, y, e: -smoothed(x, y, e)),
        ("sum over rows", lambda x, y, e: len(x) * smoothed(x, y, e)),
        ("smoothed_loss: right", lambda x, y, e: torch.nn.functional.cross_entropy(x, y, label_smoothing=e)),
    ],
)
def test_a_wrong_loss_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="smoothed_loss")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("d^-0.5 is missing", lambda s, d, w: min(s**-0.5, s * w**-1.5)),
        ("smaller rates", lambda s, d, w: d**0.5 * min(s**-0.5, s * w**-1.5)),
        ("min, not max", lambda s, d, w: d**-0.5 * max(s**-0.5, s * w**-1.5)),
        ("rises for ever", lambda s, d, w: d**-0.5 * s * w**-1.5),
        ("stays at the peak", lambda s, d, w: (d * w) ** -0.5 * min(1, s / w)),
        ("not with its root", lambda s, d, w: (d * w) ** -0.5 * min(w / s, s / w)),
        ("no warm-up", lambda s, d, w: (d * w) ** -0.5 * min(1, (w / s) ** 0.5)),
        ("transformer_rate: right", lambda s, d, w: (d * max(s, w)) ** -0.5 * min(1, s / w)),
    ],
)
def test_a_wrong_schedule_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="transformer_rate")


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
