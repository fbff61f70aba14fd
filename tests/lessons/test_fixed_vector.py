"""A1: a recurrent encoder-decoder without attention reverses 4 symbols, and fails by length."""

from __future__ import annotations

import math

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("fixed-vector")


def test_the_recurrence_is_pytorchs(lesson):
    assert lesson.names["difference"] < 1e-6


def test_a1_four_symbols_are_reversed(lesson):
    assert lesson.names["four"].float().mean() > 0.97  # the lecture: 98.125 % of symbols


def test_a1_accuracy_falls_with_the_length(lesson):
    exact = {length: c.all(dim=1).float().mean().item() for length, c in lesson.names["results"].items()}
    assert list(exact) == [2, 4, 8, 12, 20]
    assert exact[2] > 0.99 and exact[4] > 0.9 and exact[8] < 0.5 and exact[12] < 0.05 and exact[20] == 0
    by_place = lesson.names["by_place"]
    assert 0.85 < by_place[0] < 0.95  # "nine times in ten"
    assert 0.1 < by_place[-1] < 0.2  # "less than two times in ten"


def test_a_wider_vector_moves_the_wall(lesson):
    wider = lesson.names["wider"].all(dim=1).float().mean()
    assert lesson.names["results"][8].all(dim=1).float().mean() < wider < 0.5


def test_what_the_answers_count():
    assert 20 * math.log2(10) == pytest.approx(66, abs=0.5) and 4 * math.log2(10) == pytest.approx(13, abs=0.5)
    assert 0.97**20 == pytest.approx(0.54, abs=0.005)


def run(x, W, U, b, *, squash=torch.tanh):
    h = torch.zeros(len(b))
    for x_t in x:
        h = squash(W @ x_t + U @ h + b)
    return h


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("where is U h", lambda x, W, U, b: torch.tanh(W @ x[-1] + b)),
        ("inside the loop", lambda x, W, U, b: run(x[:1], W, U, b)),
        ("last symbol is not read", lambda x, W, U, b: run(x[:-1], W, U, b)),
        ("tanh is missing", lambda x, W, U, b: run(x, W, U, b, squash=lambda h: h)),
        ("U is transposed", lambda x, W, U, b: run(x, W, U.T, b)),
        ("from last to first", lambda x, W, U, b: run(x.flip(0), W, U, b)),
        ("only the last one", lambda x, W, U, b: torch.zeros(len(x), len(b))),
        ("right", run),
    ],
)
def test_a_wrong_recurrence_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="run_rnn")


def front(targets, symbol):
    return torch.full_like(targets[:, :1], symbol)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("nothing is shifted", lambda t, s: t.clone()),
        ("to the left", lambda t, s: torch.cat([t[:, 1:], front(t, s)], 1)),
        ("came round", lambda t, s: t.roll(1, dims=1)),
        ("first symbol is 0", lambda t, s: torch.cat([front(t, 0), t[:, :-1]], 1)),
        ("too long", lambda t, s: torch.cat([front(t, s), t], 1)),
        ("must stay", lambda t, s: torch.cat([front(t, s), t[:, :-1]], 1).float()),
    ],
)
def test_a_wrong_shift_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="shift_right")
