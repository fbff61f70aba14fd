"""B5, B6: label smoothing and its optimum, the paper's warm-up, a Transformer that learns to translate."""

from __future__ import annotations

import math

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("training")


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
    every = {word for pair in names["training"] for sentence in pair for word in sentence}
    assert all(word in every for pair in names["held_out"] for sentence in pair for word in sentence)
    assert names["exact"]["warm-up"] == 1 and names["exact"]["none"] < 0.1
    assert names["sure"]["warm-up"] == pytest.approx(0.9, abs=0.03)
    assert names["runs"]["warm-up"][1][-1] == pytest.approx(names["floor"], abs=0.05)


def test_a_smaller_rate_needs_no_warm_up_here(lesson):
    with torch.random.fork_rng():
        _, losses = lesson.names["train"](0.003, warmup=0)
    assert losses[-1] == pytest.approx(lesson.names["floor"], abs=0.1)


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
