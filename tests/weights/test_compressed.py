"""int8 weights in compressed-tensors' layout: what is stored, what is loaded, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.weights.compressed import INT8_CONFIG, compress_rows, is_int8


def test_a_row_is_within_half_a_step_and_its_largest_is_127():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1], [50], [0], [1]]
    )
    ints, scale = compress_rows(weight)
    assert ints.dtype == torch.int8 and scale.shape == (5, 1)
    assert ((ints * scale - weight).abs() <= 0.5001 * scale).all()
    assert ints.abs().amax(1).tolist() == [127, 127, 127, 0, 127]


@pytest.mark.parametrize("name", ["shakespeare", "reversal", "tiny"])
def test_a_model_in_int8_is_a_quarter_as_large_and_nearly_the_same(name, tmp_path):
    loaded = heedful.load(name, dtype=torch.float32)
    loaded.save(tmp_path / "int8", int8=True)
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"] == INT8_CONFIG
    n = sum(p.numel() for p in loaded.model.parameters())
    assert sum(t.nbytes for t in stored.values()) < 1.25 * n + 5000
    again = heedful.load(tmp_path / "int8")
    for key, p in again.model.named_parameters():
        exact = dict(loaded.model.named_parameters())[key]
        assert p.dtype == torch.float32 and (p - exact).abs().mean() <= exact.abs().mean() / 40
    if name == "shakespeare":
        text = loaded.generate("ROMEO:", max_tokens=20, temperature=0)
        assert again.generate("ROMEO:", max_tokens=20, temperature=0) == text


def test_shards_of_int8(tmp_path):
    heedful.load("shakespeare").save(tmp_path / "shards", int8=True, max_shard=1_000_000)
    files = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 1_100_000 for file in files)
    assert heedful.load(tmp_path / "shards").generate("ROMEO:", max_tokens=3, temperature=0)


def test_scales_that_do_not_fit_are_refused(tmp_path):
    heedful.load("tiny").save(tmp_path / "m", int8=True)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    name = next(name for name in stored if name.endswith("_scale"))
    stored[name] = torch.ones(3, 1)
    save_file(stored, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="a number for each row"):
        heedful.load(tmp_path / "m")


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "gptq"}, {"format": "pack-quantized"}, {"config_groups": {}}, {"config_groups": {"a": 3}},
     {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}}}}],
)  # fmt: skip
def test_other_layouts_are_not_taken_for_it(change):
    assert is_int8(INT8_CONFIG) and not is_int8({**INT8_CONFIG, **change})


def test_transformers_reads_it_unless_the_head_is_the_embedding(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}
    model = heedful.create("smollm2-135m", **settings, tied=False)
    heedful.save(model, tmp_path / "m", int8=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = torch.arange(12)[None]
    ours = heedful.load(tmp_path / "m").model
    with torch.inference_mode():
        assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-5
