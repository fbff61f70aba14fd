"""A2, A3, A4: scores by hand are the modules', attention reverses what a fixed vector cannot, on the anti-diagonal."""

from __future__ import annotations

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("alignment")


def test_a2_annotations_read_both_ways_and_a_step_by_hand_is_the_modules(lesson):
    assert "forward half changed at symbols  [3, 4, 5]" in lesson.text
    assert "backward half changed at symbols [0, 1, 2, 3]" in lesson.text
    assert lesson.names["difference"] < 1e-6
    assert lesson.names["alpha"].tolist() == pytest.approx([1 / 6] * 6, abs=0.02)  # "about 1/6 each"


def test_a3_luongs_scores_and_their_parameters(lesson):
    assert set(lesson.names["differences"]) == {"dot", "general", "concat"}
    assert max(lesson.names["differences"].values()) < 1e-6
    counts = {name: sum(p.numel() for p in align.parameters()) for name, align in lesson.names["aligns"].items()}
    assert counts == {"dot": 0, "general": 8 * 8, "concat": 2 * 8 * 8 + 8}


def test_attention_solves_what_the_fixed_vector_does_not(lesson):
    exact = {name: right.all(dim=1).float().mean() for name, right in lesson.names["right"].items()}
    assert exact["none"] == 0  # "not one of 500"
    assert exact["general"] > 0.98
    assert lesson.names["right"]["general"].float().mean(dim=0).min() > 0.98  # "the curve is flat"


def test_a4_weights_lie_on_the_anti_diagonal(lesson):
    assert lesson.names["on_mirror"] > 0.95
    looked = lesson.names["looked"]  # of the shipped model; the last row writes the end
    assert looked.shape == (21, 20)
    assert looked[:20].argmax(dim=1).tolist() == list(range(19, -1, -1))


def test_a3_twenty_symbols_are_reversed_and_longer_ones_are_not(lesson):
    exact = lesson.names["exact"]
    assert exact[20] == 1 and exact[22] < 0.2 and exact[26] < 0.05
    assert lesson.names["inputs"].targets[:20] == lesson.names["text"].split()[::-1]


def test_attention_costs_more_than_the_recurrence_beyond_six_widths(lesson):
    assert f"{192:6} {2_359_296:12,} {2_359_296:15,}" in lesson.text and 192 == 6 * lesson.names["WIDTH"]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("hidden layer", lambda s, h, W, U, v: torch.tanh(s @ W.T + h @ U.T)),
        ("before the softmax", lambda s, h, W, U, v: (torch.tanh(s @ W.T + h @ U.T) @ v).softmax(0)),
        ("tanh is missing", lambda s, h, W, U, v: (s @ W.T + h @ U.T) @ v),
        ("no part in the scores", lambda s, h, W, U, v: torch.tanh(h @ U.T) @ v),
        ("swapped", lambda s, h, W, U, v: torch.tanh(s @ U.T + h @ W.T) @ v),
        ("transposed", lambda s, h, W, U, v: torch.tanh(s @ W + h @ U) @ v),
        ("add W s and U h first", lambda s, h, W, U, v: (torch.tanh(s @ W.T) + torch.tanh(h @ U.T)) @ v),
        ("right", lambda s, h, W, U, v: torch.stack([v @ torch.tanh(W @ s + U @ row) for row in h])),
    ],
)
def test_wrong_scores_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="additive_scores")


def masked_in_place(scores, h, length):
    scores[length:] = -torch.inf
    return scores.softmax(0) @ h


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("padding leaks", lambda e, h, n: e.softmax(0) @ h),
        ("Which score", lambda e, h, n: (e * (torch.arange(len(e)) < n)).softmax(0) @ h),
        ("masked after the softmax", lambda e, h, n: e.softmax(0)[:n] @ h[:n]),
        ("returns the weights", lambda e, h, n: e.softmax(0)),
        ("softmax is missing", lambda e, h, n: e[:n] @ h[:n]),
        ("divided by the length", lambda e, h, n: e[:n].softmax(0) @ h[:n] / n),
        ("changed the scores", masked_in_place),
        ("right", lambda e, h, n: e[:n].softmax(0) @ h[:n]),
    ],
)
def test_a_wrong_context_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="context_vector")
