"""B4: the sinusoids' formula, each of their properties, the matrix for "I am a robot", the slide's pairing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("positions")


def test_b4_the_matrix_for_i_am_a_robot(lesson):
    published = [[0, 1, 0, 1], [0.84, 0.54, 0.10, 1.0], [0.91, -0.42, 0.20, 0.98], [0.14, -0.99, 0.30, 0.96]]
    assert lesson.names["robot"].numpy() == pytest.approx(np.array(published), abs=0.005)
    assert "robot    0.14  -0.99   0.30   0.96" in lesson.text


def test_b4_fifty_by_128_after_the_formula(lesson):
    table = lesson.names["table"]
    assert table.shape == (50, 128)
    for p in (0, 1, 7, 49):
        for i in (0, 1, 31, 63):
            angle = p / 10000 ** (2 * i / 128)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_b4_unique_bounded_deterministic_consistent_any_length(lesson):
    many, encode = lesson.names["many"], lesson.names["encode"]
    assert lesson.names["apart"].min() > 1.9 and "are 1.95 apart" in lesson.text
    assert many.abs().max() <= 1
    assert many.norm(dim=1).numpy() == pytest.approx(8)
    assert torch.equal(encode(2000, 128), many) and "0 parameters, the same twice: True" in lesson.text
    for step in (1, 5, 20, 300):
        distance = (many[step:] - many[:-step]).norm(dim=1)
        assert distance.max() - distance.min() < 1e-9
    assert lesson.names["error"] < 1e-9
    assert lesson.names["far"].norm().item() == pytest.approx(8, abs=1e-4)


def test_b4_the_slides_pairing_breaks_two_of_them(lesson):
    wrong = lesson.names["wrong"]
    lengths, steps = wrong.norm(dim=1), (wrong[1:] - wrong[:-1]).norm(dim=1)
    assert lengths.max() - lengths.min() > 0.4 and steps.max() > 2 * steps.min()
    assert "in 50 words: 51\n" in lesson.text and "in 50 words: 90\n" in lesson.text


def test_words_without_positions_are_a_set(lesson):
    assert lesson.names["difference"] < 1e-6


def test_learned_positions_are_in_a_row(lesson):
    of_learned = lesson.names["of_learned"]
    assert of_learned.diagonal(1).mean() > 0.99 and of_learned.diagonal(32).mean() < 0.1
    assert all(of_learned.diagonal(k).std() < 0.04 for k in (1, 8, 32))
    assert "position 64: index out of range" in lesson.text


def test_rotary_scores_depend_on_the_distance(lesson):
    scores = [line.split()[-1] for line in lesson.text.splitlines() if line.startswith("rotary:")]
    assert len(scores) == 3 and len(set(scores)) == 1


def interleaved(positions, exponents, n, *, cosine_first=False):
    angle = positions[:, None] / n**exponents
    pair = [angle.cos(), angle.sin()] if cosine_first else [angle.sin(), angle.cos()]
    return torch.stack(pair, dim=-1).flatten(1)


def halves(positions, exponents, n):
    angle = positions[:, None] / n**exponents
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def by_dimension(length, d, n, factor):
    dimension = torch.arange(d)
    angle = torch.arange(length)[:, None] / n ** (factor * dimension / d)
    return torch.where(dimension % 2 == 0, angle.sin(), angle.cos())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("the slide's mistake", lambda t, d, n: by_dimension(t, d, n, 2)),
        ("different speeds", lambda t, d, n: by_dimension(t, d, n, 1)),
        ("must be 2i/d", lambda t, d, n: interleaved(torch.arange(t), torch.arange(d // 2) / d, n)),
        ("must alternate", lambda t, d, n: halves(torch.arange(t), torch.arange(0, d, 2) / d, n)),
        ("begin at 1", lambda t, d, n: interleaved(torch.arange(1, t + 1), torch.arange(0, d, 2) / d, n)),
        ("n is not used", lambda t, d, n: interleaved(torch.arange(t), torch.arange(0, d, 2) / d, 10000)),
        ("swapped", lambda t, d, n: interleaved(torch.arange(t), torch.arange(0, d, 2) / d, n, cosine_first=True)),
        ("above 1", lambda t, d, n: torch.arange(t)[:, None].expand(t, d)),
    ],
)
def test_wrong_positions_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="position_matrix")


def back(n):
    return (torch.arange(n)[:, None] - torch.arange(n)).float()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("the sign is wrong", lambda n, slope: slope * back(n).clamp(min=0)),
        ("transposed", lambda n, slope: -slope * back(n).T.clamp(min=0)),
        ("falls to the right too", lambda n, slope: -slope * back(n).abs()),
        ("slope is not used", lambda n, slope: -back(n).clamp(min=0)),
        ("favour the future", lambda n, slope: -slope * back(n)),
    ],
)
def test_a_wrong_alibi_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="alibi_bias")
