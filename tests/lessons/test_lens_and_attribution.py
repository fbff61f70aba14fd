"""The logit lens, direct logit attribution, integrated gradients: each with the equation that it fulfils."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("lens-and-attribution")


def test_the_lens_is_norm_and_head(lesson):
    assert lesson.names["lens_difference"] < 1e-5
    last = [row[-1] for row in lesson.names["pieces"]]
    assert last[0] == " the" and " first" in last and " same" in last  # itself, then pairs of words
    assert last[7:] == [" world"] * 6


def test_answers_come_at_different_depths(lesson):
    (world, early), (throne, late), (sea, also_late) = lesson.names["curves"].values()
    assert (world, throne, sea) == (" world", " throne", " sea")
    assert early[8] > 0.95 and 0.7 < early[-1] < 0.9
    assert late[-2] < late[-1] and late[8] < 0.1 and also_late[8] < 0.1


def test_direct_attribution_is_exact(lesson):
    assert len(lesson.names["parts"]) == 1 + 12 * (6 + 1)
    assert lesson.names["errors"]["logits"] < 1e-4 and lesson.names["errors"]["stream"] < 1e-4
    name, value = lesson.names["ranked"][0]
    assert name == "7.5" and value > 1.5
    direct = lesson.names["direct"].sum().item()
    assert direct == pytest.approx(2.36, abs=0.02)


def test_integrated_gradients_are_complete_and_gradients_are_not(lesson):
    change, missing = lesson.names["change"], lesson.names["missing"]
    assert missing[64] < 1e-3 * change < missing[1]
    assert abs(lesson.names["one_step"].sum()) < 0.1 * change  # "nearly nothing"
    assert abs(sum(lesson.names["left_out"])) < 0.1 * change
    best = lesson.names["integrated"][1:-1].topk(2).indices.tolist()
    assert {lesson.names["labels"][i] for i in best} == {"wonderful", "beautiful"}


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("right", lambda s, g, t, eps: nn.functional.rms_norm(s, s.shape[-1:], g, eps) @ t.T),
        ("norm is missing", lambda s, g, t, eps: s @ t.T),
        ("as layer norm does", lambda s, g, t, eps: nn.functional.layer_norm(s, s.shape[-1:], g, None, eps) @ t.T),
        ("gain is missing", lambda s, g, t, eps: nn.functional.rms_norm(s, s.shape[-1:], None, eps) @ t.T),
        ("eps is missing", lambda s, g, t, eps: nn.functional.rms_norm(s, s.shape[-1:], g, 1e-9) @ t.T),
        ("not their sum", lambda s, g, t, eps: s / (s.square().sum(-1, keepdim=True) + eps).sqrt() * g @ t.T),
        ("over the layers", lambda s, g, t, eps: s / (s.square().mean(0, keepdim=True) + eps).sqrt() * g @ t.T),
        ("probabilities", lambda s, g, t, eps: (nn.functional.rms_norm(s, s.shape[-1:], g, eps) @ t.T).softmax(-1)),
    ],
)
def test_a_wrong_lens_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="lens_logits")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("its own root", lambda p, g, d, eps: nn.functional.rms_norm(p, p.shape[-1:], g, eps) @ d),
        ("missing", lambda p, g, d, eps: p * g @ d),
        ("gain is missing", lambda p, g, d, eps: p / (p.sum(0).square().mean() + eps).sqrt() @ d),
        ("for each part", lambda p, g, d, eps: nn.functional.rms_norm(p.sum(0), p.shape[-1:], g, eps) @ d),
    ],
)
def test_wrong_attribution_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="direct_attribution")


def mean_gradient(f, x, baseline, steps, first=0.5):
    points = [(baseline + (k + first) / steps * (x - baseline)).requires_grad_() for k in range(steps)]
    return sum(torch.autograd.grad(f(point), point)[0] for point in points) / steps


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("right", lambda f, x, b, n: (x - b) * mean_gradient(f, x, b, n)),
        ("gradient at the end", lambda f, x, b, n: (x - b) * mean_gradient(f, x, x, 1)),
        ("multiplies by x", lambda f, x, b, n: x * mean_gradient(f, x, b, n)),
        ("begins at 0", lambda f, x, b, n: x * mean_gradient(f, x, torch.zeros_like(x), n)),
        ("attribution is 1", lambda f, x, b, n: mean_gradient(f, x, b, n)),
        ("do not sum", lambda f, x, b, n: (x - b) * mean_gradient(f, x, b, n, first=0)),
    ],
)
def test_wrong_gradients_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="integrated_gradients")
