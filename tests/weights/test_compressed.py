"""int8 and int4 weights in compressed-tensors' layout: what is stored, what is loaded, what is refused."""

import json
import math
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.weights.compressed import (
    CompressedSource,
    compress,
    compress_rows,
    is_supported,
    multiply_int4,
    pack_int4,
    pack_rows_int4,
    quantization_config,
)
from heedful.weights.load import DictSource


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
    loaded.save(tmp_path / "int8", quantize="int8")
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"] == quantization_config()
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
    heedful.load("shakespeare").save(tmp_path / "shards", quantize="int8", max_shard=1_000_000)
    files = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 1_100_000 for file in files)
    assert heedful.load(tmp_path / "shards").generate("ROMEO:", max_tokens=3, temperature=0)


def test_scales_that_do_not_fit_are_refused(tmp_path):
    heedful.load("tiny").save(tmp_path / "m", quantize="int8")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    name = next(name for name in stored if name.endswith("_scale"))
    stored[name] = torch.ones(3, 1)
    save_file(stored, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="a number for each row"):
        heedful.load(tmp_path / "m")


def test_int4_is_packed_as_compressed_tensors_packs_it():
    ints = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1], [0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    packed = pack_int4(ints)
    assert packed.tolist() == [[0x76543210], [0xFEDCBA98 - 2**32]]  # as its pack_to_int32 gives
    scales = torch.tensor([[0.5, -2.0], [1.0, 0.25]], dtype=torch.float16)
    expected = torch.tensor([[-4, -3.5, -3, -2.5, 8, 6, 4, 2], [0, 1, 2, 3, 1, 1.25, 1.5, 1.75]])
    assert torch.equal(multiply_int4(packed, scales, 8), expected)
    zero_point = torch.tensor([[-8, 7], [-7, 0], [-6, 1]], dtype=torch.int8)  # of eight rows in one, the rest 0
    assert pack_rows_int4(zero_point).tolist() == [[0x210, 0x98F]]
    moved = expected - (ints[:, :2] * scales).repeat_interleave(4, 1)
    assert torch.equal(multiply_int4(packed, scales, 8, ints[:, :2]), moved)
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    except ImportError:
        return
    many = torch.randint(-8, 8, (7, 96), dtype=torch.int8)
    assert torch.equal(pack_int4(many), pack_to_int32(many, 4))
    assert torch.equal(pack_rows_int4(many), pack_to_int32(many, 4, packed_dim=0))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e7])
def test_a_group_in_int4_is_nearer_than_with_the_plain_scale(size):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * size
    weight[3, 32:] = 0
    stored = dict(compress([("w", weight)], {"w"}))
    scales = stored["w_scale"]
    assert scales.shape == (40, 2) and scales.isfinite().all()
    restored = multiply_int4(stored["w_packed"], scales, 64)
    assert (restored[3, 32:] == 0).all()
    largest = weight.view(40, 2, 32).abs().amax(2, keepdim=True)
    plain = ((weight.view(40, 2, 32) / largest * 7).round() / 7 * largest).view(40, 64).nan_to_num()
    error = (restored - weight).square().view(40, 2, 32).sum(2)
    assert (error <= (plain - weight).square().view(40, 2, 32).sum(2) * 1.01).all()
    assert error.mean() < 0.75 * (plain - weight).square().view(40, 2, 32).sum(2).mean()


def test_numbers_on_the_grid_of_int4_stay_as_they_are():
    ints = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(0))
    ints[:, ::32], ints[:, 1::32] = -8, 7
    weight = ints * torch.tensor([0.5, -0.125]).repeat_interleave(32)
    stored = dict(compress([("w", weight)], {"w"}))
    assert torch.equal(multiply_int4(stored["w_packed"], stored["w_scale"], 64), weight.float())


@pytest.mark.parametrize("name", ["shakespeare", "languages"])
def test_a_model_in_int4(name, tmp_path):
    loaded = heedful.load(name)
    loaded.save(tmp_path / "m", quantize="int4")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    packed = [key.removesuffix("_packed") for key in stored if key.endswith("_packed")]
    assert config["format"] == "mixed-precision" and is_supported(config)
    targets = [target.removeprefix("re:") for target in config["config_groups"]["group_0"]["targets"]]
    for key in stored:
        module = key.removesuffix("_packed").removesuffix(".weight")
        assert any(re.match(target, module) for target in targets) == key.endswith("_packed") or "_s" in key
    again = heedful.load(tmp_path / "m")
    parameters = dict(loaded.model.named_parameters())
    for key, p in again.model.named_parameters():
        exact = parameters[key].float()
        assert p.dtype == parameters[key].dtype and (p - exact).abs().mean() <= exact.abs().mean() / 8
    assert packed and all(stored[key + "_scale"].dtype == torch.float16 for key in packed)
    size = sum(stored[key + "_packed"].nbytes + stored[key + "_scale"].nbytes for key in packed)
    assert size == sum(math.prod(stored[key + "_shape"].tolist()) for key in packed) * 9 // 16


def test_what_has_no_blocks_is_int8_instead(tmp_path):
    model = heedful.load("reversal").model
    heedful.save(model, tmp_path / "m", quantize="int4")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"] == quantization_config()
    assert heedful.load(tmp_path / "m").model.n_parameters() == model.n_parameters()
    with pytest.raises(ValueError, match="int8 or int4, not to int3"):
        heedful.save(model, tmp_path / "n", quantize="int3")


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [("_scale", torch.ones(3, 1), "groups of the same size"),
     ("_scale", torch.ones(64, 0), "groups of the same size"),
     ("_scale", torch.ones(64, 5), "groups of the same size"),
     ("_scale", None, "beside it"),
     ("_shape", None, "beside it"),
     ("_shape", torch.tensor([64, 2**40]), "cannot be such a matrix"),
     ("_shape", torch.tensor([-64, -32]), "cannot be such a matrix"),
     ("_shape", torch.tensor([64.0, 32.0]), "two integers"),
     ("_shape", torch.tensor([64, 32, 1]), "two integers"),
     ("_packed", torch.zeros(64, 4), "a matrix of int32"),
     ("_zero_point", torch.zeros(3, 1, dtype=torch.int32), "of eight rows in each"),
     ("_packed", torch.zeros(64, 4, 1, dtype=torch.int32), "a matrix of int32"),
     ("_packed", torch.zeros(0, 0, dtype=torch.int32), "cannot be such a matrix"),
     ("", torch.zeros(64, 32), "beside it")],
)  # fmt: skip
def test_int4_that_does_not_fit_is_refused(part, tensor, message):
    packed = {"w_packed": torch.zeros(64, 4, dtype=torch.int32), "w_scale": torch.ones(64, 1).half()}
    packed |= {"w_shape": torch.tensor([64, 32])}
    source = CompressedSource(DictSource(packed), "float32")
    assert list(source.names()) == ["w"] and source.shape("w") == (64, 32)
    assert torch.equal(source.get("w"), torch.full((64, 32), -8.0))
    packed = {key: value for key, value in (packed | {"w" + part: tensor}).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        CompressedSource(DictSource(packed))


def group_of(**change: object) -> dict[str, Any]:
    """The groups of a config with one of int4, and these changes."""
    group = quantization_config(["a.weight"])["config_groups"]["group_0"]
    return {"config_groups": {"a": group | {"weights": group["weights"] | change}}}


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "gptq"}, {"config_groups": {}}, {"config_groups": {"a": 3}},
     {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}}}},
     group_of(num_bits=3), group_of(num_bits=8), group_of(symmetric=3), group_of(type="float"),
     group_of(strategy="tensor")],
)  # fmt: skip
def test_other_layouts_are_not_taken_for_it(change):
    assert is_supported(quantization_config()) and is_supported(quantization_config() | group_of())
    assert not is_supported(quantization_config() | change)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_transformers_reads_it_unless_the_head_is_the_embedding(quantize, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}
    model = heedful.create("smollm2-135m", **settings, tied=False)
    heedful.save(model, tmp_path / "m", quantize=quantize)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = torch.arange(12)[None]
    ours = heedful.load(tmp_path / "m").model
    with torch.inference_mode():
        assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-5
