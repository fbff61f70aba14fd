"""B1, B2, B3: the worked example for "cat", the slide's error, the scale, masks, heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("attention-by-hand")


def test_b1_scores_and_weights_of_cat(lesson):
    names = lesson.names
    x = np.array([[2, 5, 3], [7, 1, 4], [6, 9, 2], [3, 4, 7], [1, 8, 5], [9, 3, 6]]) / 10  # the slide's vectors
    scores = x @ x[1]
    assert scores == pytest.approx([0.31, 0.66, 0.59, 0.53, 0.35, 0.90])
    assert names["scores"].numpy() == pytest.approx(scores, abs=1e-6)
    weights = np.exp(scores / math.sqrt(3))
    weights /= weights.sum()
    assert weights == pytest.approx([0.1436, 0.1758, 0.1688, 0.1630, 0.1469, 0.2019], abs=5e-5)
    assert names["weights"].numpy() == pytest.approx(weights, abs=1e-6)
    reference = torch.nn.functional.scaled_dot_product_attention(*[torch.tensor(x)[None]] * 3)[0]
    assert names["output"].numpy() == pytest.approx(reference.numpy(), abs=1e-6)
    assert names["output"][1].tolist() == pytest.approx([0.4983, 0.4846, 0.4559], abs=5e-5)


def test_b1_what_is_printed(lesson):
    printed = lesson.text
    assert "cat · The = 0.7·0.2 + 0.1·0.5 + 0.4·0.3 = 0.14 + 0.05 + 0.12 = 0.31" in printed
    assert "= 0.63 + 0.03 + 0.24 = 0.90" in printed
    assert "mat     0.90  0.5196  1.6814  0.2019" in printed
    assert "mat  length 1.122" in printed and "cosine with cat 1.000" in printed


def test_b1_weights_that_sum_to_081_are_found_out(lesson):
    problems, scaled, weights = (lesson.names[name] for name in ("problems", "scaled", "weights"))
    assert problems(scaled, weights) == ["nothing"]
    assert problems(scaled, (weights * 100).round() / 100) == ["nothing"]
    assert problems(scaled, 0.81 * weights) == ["the weights sum to 0.81"]
    assert len(problems(scaled, weights.flip(0))) == 2
    left_out = [round(s, 2) for s in lesson.names["one_left_out"].tolist()]
    assert 0.81 not in left_out and (min(left_out), max(left_out)) == (0.80, 0.86)


def test_scores_grow_with_the_root_of_the_width_and_saturate_the_softmax(lesson):
    plain, scaled = lesson.names["measured"]["plain"], lesson.names["measured"]["scaled"]
    assert plain[-1][0] > 0.95 and plain[0][0] < 0.5
    assert all(0.3 < largest < 0.33 for largest, _ in scaled)
    assert 6.5 < scaled[-1][1] / plain[-1][1] < 7.5  # "7 times smaller"
    assert "standard deviation   8.02   √d   8.00" in lesson.text


def test_b3_masks(lesson):
    for allowed in lesson.names["causal"], lesson.names["padding"]:
        masked = lesson.names["softmax_weights"](lesson.names["all_scores"], allowed)
        assert (masked[~allowed.expand_as(masked)] == 0).all()
        assert masked.sum(dim=-1).numpy() == pytest.approx(1)
    assert lesson.names["learned"].triu(1).max() == 0
    after = (lesson.names["all_weights"] * lesson.names["causal"][0, 0]).sum(dim=1)
    assert after[0] == pytest.approx(0.16, abs=0.005)


def test_b2_heads_by_hand_are_heedfuls(lesson):
    assert lesson.names["difference"] < 1e-6
    base = lesson.names["base"]
    assert (base.n_heads, base.d_head) == (8, 64)
    assert "parameters 1,050,624" in lesson.text


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("not divided by √D", lambda q, k, v: (q @ k.T).softmax(-1) @ v),
        ("divided by D, not", lambda q, k, v: (q @ k.T / q.shape[-1]).softmax(-1) @ v),
        ("number of keys", lambda q, k, v: (q @ k.T / math.sqrt(len(k))).softmax(-1) @ v),
        ("multiplied by √D", lambda q, k, v: (q @ k.T * math.sqrt(q.shape[-1])).softmax(-1) @ v),
        ("runs over the queries", lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).softmax(0) @ v),
        ("do not sum to 1", lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).sigmoid() @ v),
        ("shape is (4, 7), not (4, 5)", lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1)),
    ],
)
def test_wrong_attention_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="scaled_attention")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("leaks", lambda s: s.softmax(-1)),
        ("leaks", lambda s: s.masked_fill(torch.ones_like(s).triu(2).bool(), -torch.inf).softmax(-1)),
        ("attend to itself", lambda s: s.masked_fill(torch.ones_like(s).triu(0).bool(), -torch.inf).softmax(-1)),
        ("wrong triangle", lambda s: s.masked_fill(torch.ones_like(s).tril(-1).bool(), -torch.inf).softmax(-1)),
        ("applied after the softmax", lambda s: s.softmax(-1).tril()),
        ("applied after the softmax", lambda s: s.tril().softmax(-1).tril()),
        ("changed its input", lambda s: s.masked_fill_(torch.ones_like(s).triu(1).bool(), -torch.inf).softmax(-1)),
    ],
)
def test_wrong_masks_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="causal_weights")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("swap two axes", lambda x, n: x.unflatten(-1, (n, -1))),
        ("mixes words", lambda x, n: x.reshape(n, len(x), -1)),
        ("every third number", lambda x, n: x.unflatten(-1, (-1, n)).permute(2, 0, 1)),
    ],
)
def test_wrong_heads_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="split_heads")
