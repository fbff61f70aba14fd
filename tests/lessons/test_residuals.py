"""B9: the gradient that reaches the first layer with and without skips, by depth; layer norm; pre and post."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("residuals")


def test_b9_the_gradient_vanishes_without_skips_and_not_with_them(lesson):
    first = lesson.names["first"]
    assert lesson.names["depths"] == [2, 4, 8, 16, 24]
    neither = first["neither"]
    assert all(deep < shallow for shallow, deep in itertools.pairwise(neither))
    assert neither[-1] / neither[0] < 1e-9  # one part in a thousand million
    assert first["skip only"][-1] > 1e8
    for kind in "skip and norm (pre)", "skip and norm (post)":
        assert all(0.5 < value < 50 for value in first[kind])


def test_b9_only_both_together_learn(lesson):
    final = lesson.names["final"]
    for kind in "neither", "norm only", "skip only":
        assert final[kind] > 1.9  # guessing is 2.08
    assert final["skip and norm (pre)"] < 0.1
    assert 0.1 < final["skip and norm (post)"] < 1.5


def test_the_stream_grows_without_norms(lesson):
    gradients = lesson.names["gradients"]
    assert gradients("skip only", 16)[1][-1] > 1000
    assert gradients("skip and norm (pre)", 16)[1][-1] < 5
    assert gradients("skip and norm (post)", 16)[1] == pytest.approx([1] * 16, abs=0.01)


def test_layer_norm_by_hand_is_pytorchs(lesson):
    reference = nn.functional.layer_norm(lesson.names["x"], (32,))
    assert torch.allclose(lesson.names["by_hand"], reference, atol=1e-5)


def test_each_block_of_tiny_books_adds_to_its_stream(lesson):
    seen = lesson.names["seen"]
    sizes = [seen[f"decoder.{i}.before"].norm(dim=-1).mean() for i in range(4)]
    sizes.append(seen["decoder.3.after"].norm(dim=-1).mean())
    assert all(a < b for a, b in itertools.pairwise(sizes))
    added = [(seen[f"decoder.{i}.after"] - seen[f"decoder.{i}.before"]).norm(dim=-1).mean() for i in range(4)]
    assert added[0] > sizes[0] and all(new < old for new, old in zip(added[1:], sizes[1:], strict=False))


def normed(x, axis, **options):
    return (x - x.mean(axis, keepdim=True)) / (x.var(axis, keepdim=True, **options) + 1e-5).sqrt()


def spread(x):
    return x.std(-1, unbiased=False, keepdim=True)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("weight and bias are not used", lambda x, w, b, e: normed(x, -1, unbiased=False)),
        ("bias is not added", lambda x, w, b, e: normed(x, -1, unbiased=False) * w),
        ("not multiplied by the weight", lambda x, w, b, e: normed(x, -1, unbiased=False) + b),
        ("over the batch", lambda x, w, b, e: normed(x, 0, unbiased=False) * w + b),
        ("words of a sentence", lambda x, w, b, e: normed(x, 1, unbiased=False) * w + b),
        ("d - 1", lambda x, w, b, e: normed(x, -1) * w + b),
        ("RMSNorm", lambda x, w, b, e: nn.functional.rms_norm(x, (6,), w, e) + b),
        ("where is eps", lambda x, w, b, e: (x - x.mean(-1, True)) / spread(x) * w + b),
        ("under the square root", lambda x, w, b, e: (x - x.mean(-1, True)) / (spread(x) + e) * w + b),
    ],
)
def test_a_wrong_norm_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="layer_norm")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("no skip", lambda x, f, norm: f(norm(x))),
        ("this is post-norm", lambda x, f, norm: norm(x + f(x))),
        ("must read norm(x)", lambda x, f, norm: x + f(x)),
        ("norm is after", lambda x, f, norm: x + norm(f(x))),
        ("carries norm(x)", lambda x, f, norm: norm(x) + f(norm(x))),
    ],
)
def test_a_wrong_step_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="pre_norm_step")
