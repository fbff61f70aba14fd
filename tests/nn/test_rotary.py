"""Rotary positions and their scalings, against the reference's formulas, within the trained length and beyond it."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heedful.models.hub import read_rope, read_rotary_share, write_rope
from heedful.nn.position import Rotary

HEAD = 16  # 8 pairs
TABLES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3 without a length": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without a length": {"rope_type": "yarn", "factor": 4.0},
    "yarn, a factor of 1": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
    "yarn, all said": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 2,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn, DeepSeek's weights": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
        "long_factor": [1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0],
        "original_max_position_embeddings": 64,
    },
    "longrope, all said": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
        "factor": 16.0,
        "attention_factor": 1.19,
    },
}


def ours(table, theta=10000.0):
    return Rotary(HEAD, theta=theta, scaling=table, max_len=256)


@pytest.mark.parametrize("length", [1, 64, 65, 1000], ids=lambda n: f"at {n}")
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies_are_the_references(name, theta, length):
    table = TABLES[name]
    config = LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={**table, "rope_theta": theta},
    )
    want, factor = ROPE_INIT_FUNCTIONS[table["rope_type"]](config, seq_len=length)
    got, warmth = ours(table, theta).frequencies(length)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert warmth == pytest.approx(factor)


def test_without_scaling_the_frequencies_are_the_papers():
    got, warmth = Rotary(HEAD).frequencies()
    assert got.tolist() == pytest.approx([10000 ** (-2 * i / HEAD) for i in range(HEAD // 2)])
    assert warmth == 1.0


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("d_rotary", [HEAD, HEAD // 2])
def test_scores_depend_on_the_distance_alone(layout, d_rotary):
    rotary = Rotary(d_rotary, layout=layout)
    q, k = torch.randn(2, 1, 1, 1, HEAD, generator=torch.Generator().manual_seed(0))

    def score(i, j):
        at_i, at_j = rotary(torch.tensor([[i]])), rotary(torch.tensor([[j]]))
        return (at_i(q) * at_j(k)).sum()

    torch.testing.assert_close(score(7, 3), score(1004, 1000), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(7, 5)).abs() > 1e-3
    torch.testing.assert_close(rotary(torch.tensor([[9]]))(q)[..., d_rotary:], q[..., d_rotary:])


def test_pairs_are_a_complex_rotation():
    """The paper's own form (Su et al. 2021, equation 34): each pair times e^(i m theta)."""
    x = torch.randn(1, 1, 1, HEAD, generator=torch.Generator().manual_seed(0))
    turn = torch.polar(torch.ones(HEAD // 2), 5 * Rotary(HEAD).frequencies()[0])
    pairs = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    torch.testing.assert_close(Rotary(HEAD, layout="interleaved")(torch.tensor([[5]]))(x), pairs)
    halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    want = torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1)
    torch.testing.assert_close(Rotary(HEAD)(torch.tensor([[5]]))(halves), want)


def test_longrope_turns_each_row_by_its_own_length():
    rotary = ours(TABLES["longrope"])
    positions = torch.arange(10)[None]
    both = rotary(positions, torch.tensor([[64], [65]]))
    assert both.cos.shape == (2, 1, 10, HEAD // 2)
    for row, length in enumerate((64, 65)):
        alone = rotary(positions, length)
        assert torch.equal(both.cos[row], alone.cos[0]) and torch.equal(both.sin[row], alone.sin[0])
    assert not torch.allclose(both.cos[0], both.cos[1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not known"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0.0}, "not sound"),
        ({"rope_type": "linear", "factor": "many"}, "not sound"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "not sound"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "8 pairs"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_at_once(table, message):
    with pytest.raises(ValueError, match=message):
        ours(table)


def test_an_odd_size_is_refused():
    with pytest.raises(ValueError, match="even"):
        Rotary(7)


@pytest.mark.parametrize(
    "hub",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_the_hubs_old_and_new_forms_mean_the_same(hub):
    theta, scaling = read_rope(hub)
    assert (theta, scaling) == (5e5, {"rope_type": "linear", "factor": 2.0})
    assert read_rope(write_rope(theta, scaling)) == (theta, scaling)


def test_what_the_hub_leaves_out():
    assert read_rope({}) == (10000.0, None)
    assert read_rope({"rope_scaling": None}, 1e6) == (1e6, None)
    assert read_rotary_share({}) == 1.0
    assert read_rotary_share({"partial_rotary_factor": 0.25}) == 0.25
    assert read_rotary_share({"rope_parameters": {"partial_rotary_factor": 0.5}}) == 0.5
    with pytest.raises(ValueError, match="kind of layer"):
        read_rope({"rope_parameters": {"full_attention": {"rope_type": "default"}}})


def test_a_factor_of_longrope_comes_from_the_lengths():
    table = {k: v for k, v in TABLES["longrope"].items()}
    assert ours(table).frequencies()[1] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
