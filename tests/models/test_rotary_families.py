"""LLaMA and the decoders after it: what their configs and files on the hub say, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import heedful
from heedful.generate.engine import Engine
from heedful.generate.request import Request
from heedful.models.base import Batch
from heedful.models.gemma import Gemma, GemmaConfig
from heedful.models.llama import Llama, LlamaConfig
from heedful.models.mapping import to_hub
from heedful.models.mistral import MistralConfig
from heedful.models.mixtral import Mixtral
from heedful.models.phi import PhiConfig
from heedful.models.qwen import QwenConfig
from heedful.models.registry import create, for_hub, size, sizes
from heedful.weights.save import save
from support.case import error
from support.cases import mixtral, phi
from support.tiny import tiny

MODERN = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi", "olmo")
TINY = dict(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=61)


def read(**hub):
    return for_hub(hub).load().config_class.from_hub(hub)


@pytest.mark.parametrize("name", [n for n in sizes() if size(n).family in MODERN])
def test_a_config_survives_the_hub(name):
    config = create(name, device="meta").config
    hub = json.loads(json.dumps(config.to_hub()))
    assert type(config).from_hub(hub) == config


@pytest.mark.parametrize("family", MODERN)
def test_transformers_is_told_how_many_key_heads_there_are(family):
    hub = tiny(family).config.replace(n_heads=4, n_kv_heads=None).to_hub()
    assert AutoConfig.for_model(**hub).num_key_value_heads == 4


def test_an_empty_config_means_the_references_defaults():
    assert read(model_type="llama") == LlamaConfig()
    assert read(model_type="mistral") == MistralConfig(window=4096)
    assert read(model_type="qwen2") == QwenConfig()
    assert read(model_type="qwen3") == QwenConfig(head_norms=True, d_head=128)
    assert read(model_type="gemma") == GemmaConfig()
    assert read(model_type="phi3") == PhiConfig()
    assert read(model_type="mixtral").theta == 1e6
    second = read(model_type="gemma2")
    assert (second.d_model, second.n_kv_heads, second.score_cap, second.window) == (2304, 4, 50.0, 4096)


def test_a_null_is_not_a_missing_key():
    assert read(model_type="mistral", sliding_window=None).window is None
    assert read(model_type="mistral", num_key_value_heads=None).n_kv_heads is None
    assert read(model_type="gemma2", final_logit_softcapping=None).logit_cap is None
    assert read(model_type="llama", rms_norm_eps=None).norm_eps == 1e-6


def test_qwens_window_counts_only_where_it_is_used():
    assert read(model_type="qwen2", use_sliding_window=False, sliding_window=32768).window is None
    used = read(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=30)
    assert [used.window_at(i) for i in (29, 30)] == [None, 8]


def test_phis_early_names_of_longrope():
    table = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = read(model_type="phi3", rope_scaling=table, original_max_position_embeddings=4096)
    assert config.scaling["rope_type"] == "longrope"
    assert config.scaling["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    "hub",
    [
        dict(model_type="llama", hidden_act="gelu"),
        dict(model_type="llama", partial_rotary_factor=0.5),
        dict(model_type="mistral", sliding_window=None, layer_types=["sliding_attention"] * 32),
        dict(model_type="qwen2", layer_types=["sliding_attention"] * 32),
        dict(model_type="gemma", use_bidirectional_attention=True),
        dict(model_type="gemma", hidden_act="relu"),
        dict(model_type="gemma2", hidden_activation="gelu"),
        dict(model_type="phi3", rope_scaling={"type": "linear", "factor": 2.0}),
    ],
    ids=lambda hub: ", ".join(str(v) for v in list(hub.items())[0:2]),
)
def test_what_is_not_implemented_is_refused(hub):
    with pytest.raises(ValueError, match="not supported"):
        read(**hub)


def test_gemma_1_cannot_be_saved_with_gemma_2s_parts():
    with pytest.raises(ValueError, match="no layout"):
        GemmaConfig(window=8).to_hub()


def test_norms_with_an_offset_begin_as_ones():
    model = Gemma.create(GemmaConfig(**TINY, d_head=8))
    assert model.decoder.norm.weight.abs().max() == 0
    assert Llama.create(LlamaConfig(**TINY)).decoder.norm.weight.min() == 1


def test_mixtrals_map_follows_the_files(tmp_path):
    """What the reference writes, name by name, though in memory it keeps the experts stacked."""
    case = mixtral.CASES[0]
    reference = case.reference()
    reference.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    ours = case.ours(reference)
    assert isinstance(ours, Mixtral)
    written = dict(to_hub(ours.weight_map(), dict(ours.named_parameters())))
    assert written.keys() == files.keys()
    assert all(torch.equal(written[name], files[name]) for name in files)


@pytest.fixture
def longrope():
    """Rotated otherwise from 19 tokens on."""
    case = phi.CASES[1]
    model = case.model()
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        yield model, tokens


def test_a_row_that_grows_past_longropes_length_is_read_anew(longrope):
    model, tokens = longrope
    _, state = model.start(Batch(tokens[:, :14], torch.tensor([14, 9])))
    for n in range(10):  # rows cross at different steps
        got = model.step(tokens[[0, 1], [14 + n, 9 + n]], state)
        for row, length in enumerate((15 + n, 10 + n)):
            assert error(got[row], model(tokens[row : row + 1, :length]).logits[0, -1]) < 1e-5


def test_rows_on_both_sides_of_longropes_length(longrope):
    model, tokens = longrope
    lengths = torch.tensor([25, 12])
    together, (started, _) = (
        model(Batch(tokens[:, :25], lengths)).logits,
        model.start(Batch(tokens[:, :25], lengths)),
    )
    for row, length in enumerate((25, 12)):
        alone = model(tokens[row : row + 1, :length]).logits[0]
        assert error(together[row, :length], alone) < 1e-5
        assert error(started[row], alone[-1]) < 1e-5
    packed = Batch(torch.cat([tokens[0, :25], tokens[1, :12]])[None], documents=torch.tensor([[0] * 25 + [1] * 12]))
    assert error(model(packed).logits[0, 25:], model(tokens[1:, :12]).logits[0]) < 1e-5


def test_truncating_back_below_longropes_length(longrope):
    model, tokens = longrope
    _, state = model.start(tokens[:, :17])
    got = model.step(tokens[:, 17:22], state)  # several at once, over the border
    assert error(got, model(tokens[:, :22]).logits[:, 17:]) < 1e-5
    state.truncate(15)
    state.select([1, 0, 1])
    got = model.step(tokens[[1, 0, 1], 15], state)
    assert error(got, model(tokens[[1, 0, 1], :16]).logits[:, -1]) < 1e-5
    state.free(0)
    got = model.step(tokens[[0, 0, 1], [0, 16, 16]], state)
    assert error(got[0], model(tokens[:1, :1]).logits[0, -1]) < 1e-5
    assert error(got[1], model(tokens[:1, :17]).logits[0, -1]) < 1e-5


# --- the context length ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*MODERN, "gpt_neox", "gpt_j"])
def test_the_context_is_the_trained_one_and_a_setting_goes_beyond(family):
    model = tiny(family, max_len=8)
    engine = Engine(model)
    with pytest.raises(ValueError, match=r"the prompt's 9 tokens do not fit.* 8; .*context_length"):
        engine.add(Request(prompt=tuple(range(9))))
    with pytest.raises(ValueError, match="9 tokens do not fit"):
        model(torch.arange(9)[None])
    (result,) = engine.run([Request(prompt=(1, 2, 3), max_tokens=99)])
    assert len(result.choices[0].tokens) == 6 and result.choices[0].finish_reason == "length"
    model.set_context_length(16)
    (result,) = Engine(model).run([Request(prompt=tuple(range(9)), max_tokens=99)])
    assert len(result.choices[0].tokens) == 8 and result.choices[0].finish_reason == "length"


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt_j"])
def test_a_context_that_was_set_is_saved_beside_the_references_own(family, tmp_path):
    model = tiny(family)
    model.set_context_length(4096)
    save(model, tmp_path / "far")
    hub = json.loads((tmp_path / "far" / "config.json").read_text())
    assert hub["context_length"] == 4096 and 64 in (hub.get("max_position_embeddings"), hub.get("n_positions"))
    assert AutoConfig.from_pretrained(tmp_path / "far").max_position_embeddings == 64
    assert heedful.load(tmp_path / "far").model.context_length == 4096
    assert heedful.load(tmp_path / "far", context_length=32).model.context_length == 32
    assert "context_length" not in tiny(family).config.to_hub()


def test_a_scaling_stretches_the_context_unless_the_file_counts_it():
    def context(length, **rope):
        return read(model_type="llama", max_position_embeddings=length, rope_scaling=rope).longest

    assert context(4096, type="linear", factor=4.0) == 16384  # as longchat and vicuna-16k have it
    assert context(32768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768) == 131072  # Qwen 2.5
    assert context(131072, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768) == 131072
    llama3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    assert context(131072, rope_type="llama3", factor=8.0, **llama3) == 131072


def test_a_table_of_positions_cannot_grow():
    for family, says in ("gpt", "a limit of 64"), ("bert", "a limit of 64"), ("t5", "no limit"):
        with pytest.raises(ValueError, match=f"context length of a {family} cannot be set: it has {says}"):
            tiny(family).set_context_length(128)
