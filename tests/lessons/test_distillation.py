"""The lesson on distillation: the losses by hand, what a teacher is worth, the table of RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def names():
    return executed("distillation").names


def test_temperature_brings_out_small_probabilities(names):
    assert names["entropy"][1] < 5 < names["entropy"][2] < names["entropy"][4]
    assert float(names["logits"].softmax(dim=-1).max()) == pytest.approx(0.46, abs=0.02)


def test_the_gradient_shrinks_by_more_than_the_temperature(names):
    plain, scaled = zip(*names["sizes"].values(), strict=True)
    assert plain[-1] < plain[0] / 20
    assert scaled[-1] > plain[-1] * 60


def test_the_losses_by_hand_are_heedfuls(names):
    with torch.no_grad():
        loss = names["objective"](names["student"], names["batch"])
    for name, value in names["by_hand"].items():
        total, n = loss.metrics[name]
        assert float(value) == pytest.approx(float(total) / int(n), rel=1e-4)
    assert float(names["whole"]) == pytest.approx(float(loss.sum) / int(loss.n_targets), rel=1e-4)


def test_the_student_is_every_second_layer(names):
    assert "layer 1 of the student is layer 2 of the teacher" in executed("distillation").text
    assert (names["teacher"].model.n_parameters(), names["student"].n_parameters()) == (6960962, 4524864)
    assert names["teacher"].model.embed.weight.shape == (8000, 256)


def test_a_teacher_is_worth_more_than_the_words_alone(names):
    (own, zero), (untaught, apart), (alone, alone_apart), (taught, taught_apart) = names["results"].values()
    assert zero == pytest.approx(0, abs=1e-5) and own == pytest.approx(1.53, abs=0.05)
    assert untaught == pytest.approx(4.07, abs=0.1)
    assert own < taught < alone < untaught
    assert taught_apart < alone_apart < apart


def test_the_table_is_that_of_the_results():
    results = (Path(__file__).parents[2] / "RESULTS.md").read_text(encoding="utf-8")
    lines = [line for line in results.splitlines() if "8.3 M for 12.0 M" in line]
    table = {
        "| SST-2, 1,821 test": ("85.8 %", "84.0 %", "97.9 %", "0.44 for 0.90"),
        "| spam, 1,035 test": ("98.9 %", "98.6 %", "99.7 %"),
    }
    for begin, cells in table.items():
        (line,) = [line for line in lines if line.startswith(begin)]
        assert all(cell in line for cell in cells)
    assert "heedful train sentiment-distilled --set objective.teacher=RUN" in results


def test_what_is_said_of_wrong_answers(capsys):
    def said(answer, name):
        return verdict(answer, capsys, name=name)

    def soft(student, teacher, t, *, factor=True, student_t=None, teacher_t=None, reduce="mean"):
        p = (teacher / (teacher_t or t)).log_softmax(-1)
        q = (student / (student_t or t)).log_softmax(-1)
        each = (p.exp() * (p - q)).sum(-1) * (t**2 if factor else 1)
        return each.mean() if reduce == "mean" else each.sum()

    def changed(**how):
        return lambda s, t, temperature: soft(s, t, temperature, **how)

    assert "right" in said(changed(), "soft_loss")
    assert "T² is missing" in said(changed(factor=False), "soft_loss")
    assert "take the mean" in said(changed(reduce="sum"), "soft_loss")
    assert "not one of them" in said(changed(teacher_t=1), "soft_loss")
    assert "not divided by the temperature" in said(changed(teacher_t=1, student_t=1), "soft_loss")
    assert "in front are the teacher's" in said(lambda s, t, temperature: soft(t, s, temperature), "soft_loss")

    def entropy_too(s, t, temperature):
        return temperature**2 * F.cross_entropy(s / temperature, (t / temperature).softmax(-1))

    assert "cross-entropy" in said(entropy_too, "soft_loss")

    cosine = F.cosine_similarity
    assert "right" in said(lambda a, b: (1 - cosine(a, b, dim=-1)).mean(), "cosine_loss")
    assert "cosine itself" in said(lambda a, b: cosine(a, b, dim=-1).mean(), "cosine_loss")
    assert "take the mean" in said(lambda a, b: (1 - cosine(a, b, dim=-1)).sum(), "cosine_loss")
    assert "flattened" in said(lambda a, b: 1 - cosine(a.flatten(), b.flatten(), dim=0), "cosine_loss")
    assert "two lengths" in said(lambda a, b: 1 - (a * b).sum(-1).mean(), "cosine_loss")
    assert "the features" in said(lambda a, b: 1 - cosine(a, b, dim=1).mean(), "cosine_loss")
