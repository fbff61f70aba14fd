"""The GPT families' sizes against their papers, and what their hub configs may and may not ask for."""

import pytest

from heedful.models.gpt import GPTConfig
from heedful.models.gpt_j import GPTJConfig
from heedful.models.gpt_neo import GPTNeoConfig
from heedful.models.gpt_neox import GPTNeoXConfig
from heedful.models.image_gpt import ImageGPTConfig
from heedful.models.registry import create, size

# GPT-3, Table 2.1: the name, n_params as printed, and how many of its digits are meant.
TABLE = [
    ("gpt3-125m", "125M", 3),
    ("gpt3-760m", "760M", 2),
    ("gpt3-1.3b", "1.3B", 2),
    ("gpt3-2.7b", "2.7B", 2),
    ("gpt3-6.7b", "6.7B", 2),
    ("gpt3-13b", "13B", 2),
    ("gpt3-175b", "175B", 3),
]


def short(n: int, digits: int) -> str:
    value = float(f"{n:.{digits - 1}e}")
    return f"{value / 1e9:g}B" if value >= 1e9 else f"{value / 1e6:g}M"


@pytest.mark.parametrize(("name", "printed", "digits"), TABLE)
def test_gpt3_counts_round_to_the_papers(name, printed, digits):
    assert short(create(name, device="meta").n_parameters(), digits) == printed


def test_gpt3_350m_is_356():
    """The one entry of the table that is rounded to the next fifty."""
    assert size("gpt3-350m").parameters == 355_871_744


def test_gpt3_xl_cannot_be_as_printed():
    """24 heads of 128 in a width of 2048 make 1.5 billion parameters, not the row's 1.3."""
    printed = create("gpt3-1.3b", device="meta", n_heads=24, d_head=128)
    assert short(printed.n_parameters(), 2) == "1.5B"


def test_gpt3_alternates_dense_and_banded():
    model = create("gpt3-175b", device="meta")
    windows = [block.attention.window for block in model.decoder.blocks]
    assert windows == [None, 256] * 48
    assert model.context_length == 2048


@pytest.mark.parametrize(
    ("name", "printed"), [("igpt-s", 76), ("igpt-m", 455), ("igpt-l", 1362)]
)  # in millions, cut off (Chen et al. 2020, section 3.3)
def test_image_gpt_counts_are_the_papers(name, printed):
    assert create(name, device="meta").n_parameters() // 10**6 == printed


def test_pythia_counts_without_embeddings_are_the_papers():
    """Biderman et al. 2023, Table 1."""
    table = {
        "pythia-70m": 18_915_328,
        "pythia-160m": 85_056_000,
        "pythia-410m": 302_311_424,
        "pythia-1b": 805_736_448,
        "pythia-1.4b": 1_208_602_624,
        "pythia-2.8b": 2_517_652_480,
        "pythia-6.9b": 6_444_163_072,
        "pythia-12b": 11_327_027_200,
    }
    for name, n in table.items():
        model = create(name, device="meta")
        assert model.n_parameters() - model.embed.weight.numel() - model.head.weight.numel() == n


def test_gpt_neox_reads_the_old_names():
    old = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_size": 64}
    new = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = GPTNeoXConfig.from_hub(old)
    assert (config.rotated, config.theta, config.scaling) == (0.5, 500.0, None)
    assert GPTNeoXConfig.from_hub({"rope_parameters": new, "hidden_size": 64}) == config


@pytest.mark.parametrize("types", [[[["global", "local"], 3]], [[["local"], 2], [["global"], 4]], [[["global"], 6]]])
def test_gpt_neo_layers_in_the_hubs_form(types):
    kinds = [k for some, times in types for k in some * times]
    config = GPTNeoConfig.from_hub({"num_layers": 6, "attention_types": types})
    assert list(config.pattern) * (6 // len(config.pattern)) == kinds
    assert GPTNeoConfig.from_hub(config.to_hub()) == config


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(d_ff=100, dropout=0.2, act="relu"),
        GPTConfig(norm_first=False, vocab_size=99),
        GPTJConfig(d_rotary=32, d_ff=77),
        GPTNeoXConfig(parallel=False, attention_bias=False, tied=True, rotated=1.0, theta=7.0),
        GPTNeoXConfig(scaling={"rope_type": "linear", "factor": 4.0}),
        ImageGPTConfig(vocab_size=17, max_len=784, d_ff=64),
    ],
    ids=str,
)
def test_what_goes_to_the_hub_comes_back(config):
    assert type(config).from_hub(config.to_hub()) == config


@pytest.mark.parametrize(
    ("config_class", "hub", "named"),
    [
        (GPTConfig, {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
        (GPTConfig, {"model_type": "gpt2", "add_cross_attention": True}, "cross_attention"),
        (GPTNeoConfig, {"attention_types": [[["global"], 3]]}, "3 layers of 24"),
        (GPTNeoConfig, {"attention_types": [[["sparse"], 24]]}, "sparse"),
        (GPTNeoConfig, {"window_size": 0}, "window"),
        (GPTJConfig, {"rotary_dim": None}, "rotary_dim"),
        (GPTJConfig, {"rotary_dim": 512}, "d_rotary 512"),
        (GPTNeoXConfig, {"rotary_pct": 1.5}, "rotated"),
        (ImageGPTConfig, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_implemented_is_named(config_class, hub, named):
    with pytest.raises(ValueError, match=named):
        config_class.from_hub(hub)


def test_banded_models_have_no_place_on_the_hub():
    with pytest.raises(ValueError, match="banded"):
        GPTConfig(band=256).to_hub()
