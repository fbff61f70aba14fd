"""A5: users without a film in common, similarity 0 before and 0.99 after; two matrices where one cannot do it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("query-key-value")


def test_a5_similarity_is_0_before_and_099_after(lesson):
    names = lesson.names
    _, sizes, vt = np.linalg.svd(names["ratings"].numpy())
    ann, ben = names["ann"].numpy(), names["ben"].numpy()
    assert ann @ ben == 0 and not (ann * ben).any()
    a, b = vt[:2] @ ann, vt[:2] @ ben
    after = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert after == pytest.approx(0.99, abs=0.005)
    assert names["cosine"](names["ann"] @ names["W"], names["ben"] @ names["W"]) == pytest.approx(after, abs=1e-5)
    assert "cosine before 0.00, after 0.99" in lesson.text
    assert sizes[:3] == pytest.approx([12.48, 9.51, 1.35], abs=0.005)
    assert (sizes[:2] ** 2).sum() / (sizes**2).sum() == pytest.approx(0.993, abs=5e-4)


def test_the_concepts_are_the_genres(lesson):
    W = lesson.names["W"]
    assert (W[:3, 0] > 0.5).all() and (W[3:, 0] < 0.1).all()
    assert (W[3:, 1] > 0.6).all() and (W[:3, 1].abs() < 0.15).all()


def test_attention_over_users_recommends_films(lesson):
    assert "Alien 4.97, Serenity 4.97, Casablanca 0.00" in lesson.text


def test_one_matrix_cannot_find_the_next_word_and_two_can(lesson):
    names = lesson.names
    assert names["one_loss"] == pytest.approx(1.52, abs=0.01) and names["two_loss"] < 0.01
    assert names["one"][range(6), names["target"]].mean() == pytest.approx(0.22, abs=0.005)
    assert names["one"].numpy() == pytest.approx(names["one"].T.numpy(), abs=0.01)  # both neighbours alike


def test_a_head_is_a_concept_space_of_16_dimensions(lesson):
    assert lesson.names["rank"] == 16 and lesson.names["asymmetry"] > 0.8
    assert torch.allclose(lesson.names["queries"][0, 3], lesson.names["by_hand"], atol=1e-6)


def test_what_the_answers_count():
    assert 64**2 == 4096 and 2 * 64 * 16 == 2048
    assert 12288**2 / (2 * 12288 * 128) == 48


def svd(table):
    return torch.linalg.svd(table, full_matrices=False)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("the last concepts", lambda r, u, n: u @ svd(r).Vh[-n:].T),
        ("V is transposed", lambda r, u, n: u @ svd(r).Vh[:, :n]),
        ("singular values do not belong", lambda r, u, n: u @ svd(r).Vh[:n].T / svd(r).S[:n]),
        ("normalized", lambda r, u, n: torch.nn.functional.normalize(u @ svd(r).Vh[:n].T, dim=-1)),
        ("centred", lambda r, u, n: u @ svd(r - r.mean(0)).Vh[:n].T),
        ("shape is (4, 6)", lambda r, u, n: u @ svd(r).Vh.T),
        ("shape is (9, 3)", lambda r, u, n: svd(r).U[:, :n]),
        ("right", lambda r, u, n: -u @ svd(r).Vh[:n].T),
    ],
)
def test_wrong_concepts_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="to_concepts")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("not divided", lambda x, q, k: (x @ q) @ (x @ k).T),
        ("not √E of the words", lambda x, q, k: (x @ q) @ (x @ k).T / math.sqrt(x.shape[-1])),
        ("divided by D, not", lambda x, q, k: (x @ q) @ (x @ k).T / q.shape[-1]),
        ("swapped", lambda x, q, k: (x @ k) @ (x @ q).T / 2),
        ("only w_query", lambda x, q, k: (x @ q) @ (x @ q).T / 2),
        ("only w_key", lambda x, q, k: (x @ k) @ (x @ k).T / 2),
        ("without softmax", lambda x, q, k: ((x @ q) @ (x @ k).T / 2).softmax(-1)),
    ],
)
def test_wrong_scores_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="projected_scores")
