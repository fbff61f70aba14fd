"""Circuits: what the heads of the shipped models do, by looking and by intervening."""

from __future__ import annotations

import pytest
import torch

from heedful.observe.interventions import mean_ablation
from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("circuits")


def test_the_reversing_head_points_and_decides(lesson):
    assert lesson.names["right"] == 1.0 and 0.87 < lesson.names["on_mirror"] < 0.91
    follows = lesson.names["follows"]
    assert min(share for place, share in enumerate(follows) if place != 5) > 0.9 and follows[5] < 0.2


def test_only_the_larger_models_copy(lesson):
    gains = {name: first - second for name, (first, second, _) in lesson.names["runs"].items()}
    assert min(gains["books"], gains["chat"]) > 2
    assert max(gains[name] for name in ("tiny", "tiny-books", "shakespeare")) < 0.1


def test_induction_heads(lesson):
    """Rows of weights sum to 1, so that an even look has the mean of 1 / (t + 1)."""
    score = {name: lesson.names["head_scores"](run[2]) for name, run in lesson.names["runs"].items()}
    assert sum(1 / (t + 1) for t in range(16, 32)) / 16 == pytest.approx(0.04, abs=0.005)
    assert max(score[name][1].max() for name in ("tiny", "tiny-books", "shakespeare")) < 0.055
    previous, induction = score["books"]
    assert divmod(int(induction.argmax()), 6) == (5, 0) and induction.max() > 0.35
    assert divmod(int(previous.argmax()), 6) == (2, 4) and previous.max() > 0.85
    assert score["chat"][1].max() > 0.35


def test_the_sentence_that_begins_twice(lesson):
    labels, copier = lesson.names["labels"], lesson.names["copier"]
    second = {label: len(labels) - 1 - labels[::-1].index(label) for label in ("grey", "cat")}
    assert labels[copier[second["grey"]].argmax()] == "cat" and labels[copier[second["cat"]].argmax()] == "saw"
    assert (copier[1:10].argmax(dim=1) == 0).all()  # it rests on the first token
    assert "likeliest next: [' bird'" in lesson.text


def test_removing_a_head(lesson):
    rises = lesson.names["rises"]
    assert rises["zero"].mean() > rises["mean"].mean() > 0
    assert (rises["mean"] < 0.1).sum() >= 12  # "most heads can be spared"
    assert divmod(int(lesson.names["lost"].argmax()), 6) == (5, 0)


def test_the_induction_head_needs_the_previous_token_heads(lesson):
    found = lesson.names["found"]
    score = {name: pair[0] for name, pair in found.items()}
    assert score["4.3, previous token"] < score["nothing"] / 2 and score["both, and 1.1, 3.2"] < 0.055
    assert score["2.1 and 4.1, others"] == pytest.approx(score["nothing"], abs=0.02)
    assert score["7.1, too late"] == pytest.approx(score["nothing"], abs=1e-6)
    first, second, _ = lesson.names["runs"]["books"]
    assert found["5.0 itself"][1] - second > (first - second) / 2


def test_the_fact_moves_from_the_name_to_the_last_word_through_one_head(lesson):
    stream, carried = lesson.names["stream"], lesson.names["carried"]
    assert (stream[:3, 1] > 0.95).all() and stream[:3, 2:].abs().max() < 0.1  # layers 1, 3, 5
    assert stream[3, 7] > 0.5 and stream[-1, 7] == pytest.approx(1, abs=1e-4)
    assert divmod(int(carried.argmax()), 6) == (2, 5) and carried.max() > 0.5  # layer 7, head 5
    assert int(lesson.names["looks"].argmax()) == 1


def diagonal(weights, shift, first):
    t = torch.arange(first, weights.shape[-1])
    return weights[:, :, t, t - shift]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("copy of the token itself", lambda w, n: diagonal(w, n, n).mean((0, 2))),
        ("previous token", lambda w, n: diagonal(w, 1, n).mean((0, 2))),
        ("begin at t = n", lambda w, n: diagonal(w, n - 1, n - 1).mean((0, 2))),
        ("over the batch too", lambda w, n: diagonal(w, n - 1, n).mean(2)),
        ("a sum, not a mean", lambda w, n: diagonal(w, n - 1, n).sum((0, 2))),
        ("swapped", lambda w, n: diagonal(w.mT, n - 1, n).mean((0, 2))),
    ],
)
def test_wrong_scores_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="induction_scores")


def put(heads, head, by):
    changed = heads.clone()
    changed[:, head] = by
    return changed


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("right", lambda x, h: mean_ablation([h])(x)),
        ("is zero", lambda x, h: put(x, h, 0)),
        ("positions alone", lambda x, h: put(x, h, x[:, h].mean(1, keepdim=True))),
        ("batch alone", lambda x, h: put(x, h, x[:, h].mean(0, keepdim=True))),
        ("D numbers", lambda x, h: put(x, h, x[:, h].mean())),
        ("another head", lambda x, h: x.mean((0, 2), keepdim=True).expand_as(x)),
        ("changed its input", lambda x, h: x.zero_()),
    ],
)
def test_a_head_removed_wrongly_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="without_head")
