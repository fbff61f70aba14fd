"""Positions against the papers' formulas and numbers, and the reference implementation's functions."""

import math

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from heedful.nn.position import Alibi, Learned, RelativeBias, Sinusoidal


def table(n, width):
    return Sinusoidal(width)(torch.arange(n))


def test_sinusoidal_is_the_formula():
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same."""
    got = table(50, 128)
    for pos in (0, 1, 7, 49):
        for i in range(64):
            angle = pos / 10000 ** (2 * i / 128)
            assert abs(float(got[pos, 2 * i]) - math.sin(angle)) < 1e-6
            assert abs(float(got[pos, 2 * i + 1]) - math.cos(angle)) < 1e-6


def test_sinusoidal_of_four_tokens():
    """The matrix for "I am a robot" in 4 dimensions: sin and cos of pos, then of pos/100."""
    want = [[f(pos / step) for step in (1, 100) for f in (math.sin, math.cos)] for pos in range(4)]
    np.testing.assert_allclose(table(4, 4), want, atol=1e-7)


def test_sinusoidal_is_unique_bounded_and_deterministic():
    got = table(5000, 64)
    assert got.abs().max() <= 1
    distance = torch.cdist(got.double(), got.double(), compute_mode="donot_use_mm_for_euclid_dist")
    assert distance.fill_diagonal_(1).min() > 0.01
    assert torch.equal(got, table(5000, 64))
    assert torch.equal(got[:50], table(50, 64))  # a longer text does not move the first positions


@pytest.mark.parametrize("step", [1, 5, 40])
def test_sinusoidal_is_consistent_over_distance(step):
    """The same step looks alike everywhere: equal products, and one rotation that takes pos to pos + step."""
    got = table(400, 32).double()
    products = (got[:-step] * got[step:]).sum(-1)
    assert (products - products[0]).abs().max() < 1e-4
    angle = step / 10000 ** (torch.arange(16) / 16).double()
    sin, cos = got[:-step, 0::2], got[:-step, 1::2]
    assert (sin * angle.cos() + cos * angle.sin() - got[step:, 0::2]).abs().max() < 1e-6
    assert (cos * angle.cos() - sin * angle.sin() - got[step:, 1::2]).abs().max() < 1e-6


def test_sinusoidal_far_out_is_exact():
    """Positions of a million do not lose their digits."""
    got = Sinusoidal(8)(torch.tensor([1_000_003]))
    want = [f(1_000_003 / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)]
    np.testing.assert_allclose(got[0], want, atol=1e-6)


def test_sinusoidal_halves_are_the_same_numbers_in_another_order():
    positions = torch.arange(20)
    pairs, halves = Sinusoidal(16)(positions), Sinusoidal(16, layout="halves")(positions)
    assert torch.equal(halves, torch.cat([pairs[:, 0::2], pairs[:, 1::2]], dim=-1))


def test_learned_looks_up_with_an_offset():
    layer = Learned(10, 4, offset=2)
    assert layer.weight.shape == (12, 4)
    assert torch.equal(layer(torch.tensor([[0, 9]])), layer.weight[[2, 11]][None])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (16, 40), (64, 1000)])
def test_relative_buckets_are_the_references(bidirectional, n_buckets, max_distance):
    layer = RelativeBias(2, n_buckets=n_buckets, max_distance=max_distance, bidirectional=bidirectional)
    distance = torch.arange(-3000, 3001)
    want = T5Attention._relative_position_bucket(distance, bidirectional, n_buckets, max_distance)
    assert torch.equal(layer.bucket(distance), want)


def test_relative_bias_is_a_number_per_head_and_bucket():
    layer = RelativeBias(3, bidirectional=False)
    queries, keys = torch.tensor([[4, 5], [0, 1]]), torch.arange(6)
    bias = layer(queries, keys)
    assert bias.shape == (2, 3, 2, 6)
    assert torch.equal(bias[0, :, 1, 2], layer.weight[3])  # three back
    assert torch.equal(bias[1, :, 0], layer.weight[:1].T.expand(3, 6))  # nothing lies before position 0


def test_alibi_slopes_are_the_papers():
    """Section 3: for 8 heads 1/2, 1/4, ... 1/256; for 16 the same with geometric means between."""
    assert Alibi.slopes(8) == [2**-i for i in range(1, 9)]
    assert Alibi.slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 20, 71, 112])
def test_alibi_is_the_references(n_heads):
    """Theirs is slope · key; ours slope · (key - query): a row of scores differs by a constant only."""
    n = 7
    theirs = build_alibi_tensor(torch.ones(1, n, dtype=torch.long), n_heads, torch.float32)  # (H, 1, S)
    ours = Alibi(n_heads)(torch.arange(n)[None], torch.arange(n))  # (1, H, T, S)
    assert ours.shape == (1, n_heads, n, n)
    shifted = theirs - theirs.transpose(1, 2)  # (H, T, S)
    seen = torch.ones(n, n).tril().bool()
    assert (ours[0] - shifted)[:, seen].abs().max() < 1e-6
    assert (ours[0].diagonal(dim1=1, dim2=2) == 0).all()
