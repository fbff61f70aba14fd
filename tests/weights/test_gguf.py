"""GGUF files: written with llama.cpp's own package, read by ours."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heedful
from heedful.generate.batch import greedy_batch
from heedful.kernels.cpu.library import library
from heedful.models.base import Batch, Model
from heedful.models.gemma import Gemma, GemmaConfig
from heedful.models.qwen import Qwen, QwenConfig
from heedful.weights.gguf_file import GgufFile
from heedful.weights.gguf_layout import Interleave
from support.folders import logits, tiny_llama
from support.ggufs import Kind, write_gguf
from support.real import real_model

QUANTIZED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


def test_plain_files_give_the_same_model(tmp_path):
    model = tiny_llama()
    write_gguf(tmp_path / "m.gguf", model, "llama", bos_token_id=1, eos_token_id=2, eot_token_id=5, pad_token_id=0)
    loaded = heedful.load(tmp_path / "m.gguf")
    assert loaded.model.config == model.config
    assert torch.equal(logits(loaded.model), logits(model))
    assert (loaded.bos_id, loaded.eos_ids, loaded.pad_id, loaded.name) == (1, (2, 5), 0, "m")
    assert loaded.tokenizer is None
    loaded.save(tmp_path / "folder")
    again = heedful.load(tmp_path / "folder")
    assert torch.equal(logits(again.model), logits(model)) and again.eos_ids == (2, 5)


def test_a_tied_model_has_no_output(tmp_path):
    model = tiny_llama(tied=True)
    write_gguf(tmp_path / "m.gguf", model, "llama")
    loaded = heedful.load(tmp_path / "m.gguf").model
    assert loaded.config.tied and loaded.head.weight is loaded.embed.weight
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", [*QUANTIZED, Kind.F16, Kind.BF16], ids=lambda k: k.name)
def test_quantized_files_give_the_dequantized_model(kind, tmp_path):
    model = tiny_llama()
    stored = write_gguf(tmp_path / "m.gguf", model, "llama", kind)
    loaded = heedful.load(tmp_path / "m.gguf", dtype=torch.float32).model
    c = model.config
    for i, block in enumerate(loaded.decoder.blocks):
        pairs = [("attn_q", block.attention.query, c.n_heads), ("attn_k", block.attention.key, c.n_kv_heads)]
        for name, linear, n_heads in pairs:
            (want,) = Interleave(n_heads).load([torch.from_numpy(stored[f"blk.{i}.{name}.weight"])], [])
            assert torch.equal(linear.weight, want)
        assert torch.equal(block.feedforward.down.weight, torch.from_numpy(stored[f"blk.{i}.ffn_down.weight"]))
    kept = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert {p.dtype for p in heedful.load(tmp_path / "m.gguf").model.parameters()} == {kept}


@pytest.mark.parametrize("kind", [*QUANTIZED, *K_QUANTS, Kind.IQ4_NL], ids=lambda k: k.name)
def test_tensors_equal_the_packages_own(kind, tmp_path, monkeypatch):
    """Random blocks of every kind, in several pieces and a rest."""
    monkeypatch.setattr("heedful.weights.gguf_file.PIECE", 1024)
    per_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (7, 3 * 256)
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (shape[0], shape[1] // per_block * n_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first", np.arange(5, dtype=np.float32))
    writer.add_tensor("x", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "x.gguf") as file, np.errstate(all="ignore"):
        assert file.shape("x") == shape and file.get("first").tolist() == [0, 1, 2, 3, 4]
        got = file.get("x").numpy()
        want = gguf.quants.dequantize(packed, kind)
    assert np.array_equal(got, want, equal_nan=True)


def test_metadata_equals_the_packages_own(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values = {"b": True, "u8": 200, "i8": -3, "u64": 2**60, "f": 0.5, "text": "naïve 日本", "none": ""}
    writer.add_bool("b", True)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint64("u64", 2**60)
    writer.add_float64("f", 0.5)
    writer.add_string("text", values["text"])
    lists = {"texts": ["a", "", "ü"], "numbers": [1, -2, 3], "truths": [True, False], "floats": [0.5, 1.5]}
    for key, value in lists.items():
        writer.add_array(key, value)
    writer.add_tensor("x", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    del values["none"]
    with GgufFile(tmp_path / "x.gguf") as file:
        assert file.fields == {"general.architecture": "llama", **values, **lists}


def random_weights(model: Model) -> Model:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.15)
    return model.eval()


TINY = dict(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=80, max_len=64)
GEMMA2 = dict(after_norms=True, query_scale=32.0, score_cap=50.0, logit_cap=30.0, window=4)
OTHERS = {
    "qwen2": lambda: Qwen.create(QwenConfig(**TINY)),
    "qwen3": lambda: Qwen.create(QwenConfig(**TINY, d_head=32, head_norms=True)),
    "gemma": lambda: Gemma.create(GemmaConfig(**TINY, d_head=32)),
    "gemma2": lambda: Gemma.create(GemmaConfig(**TINY, d_head=32, **GEMMA2)),
}


@pytest.mark.parametrize("arch", OTHERS)
def test_other_architectures(arch, tmp_path):
    model = random_weights(OTHERS[arch]())
    more = {}
    if arch == "gemma2":
        more = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4)
    write_gguf(tmp_path / "m.gguf", model, arch, **more)
    loaded = heedful.load(tmp_path / "m.gguf").model
    assert type(loaded) is type(model)
    assert (logits(loaded) - logits(model)).abs().max() < 1e-5  # (norm + 1) - 1 rounds


def test_llama_3s_stretched_rotation(tmp_path):
    """The divisors that llama.cpp stores are LLaMA 3.1's formula."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = tiny_llama(scaling=scaling, d_head=32)
    rotary = model.decoder.rotary
    plain = type(rotary)(32, theta=model.config.theta).frequencies(1)[0]
    divisors = (plain / rotary.frequencies(1)[0]).numpy()
    real = gguf.GGUFWriter.write_header_to_file

    def with_divisors(self, *args, **kwargs):
        self.add_tensor("rope_freqs.weight", divisors)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        write_gguf(tmp_path / "m.gguf", model, "llama")
    loaded = heedful.load(tmp_path / "m.gguf").model
    assert (logits(loaded) - logits(model)).abs().max() < 1e-5
    assert loaded.config.scaling == scaling and len({*divisors.round(3)}) > 2


def test_what_is_not_read_says_so(tmp_path):
    model = tiny_llama()
    for arch, fields, message in [
        ("mamba", {}, "mamba"),
        ("llama", {"expert_count": 4}, "ffn_gate_exps"),
        ("llama", {"sliding_window": 4}, "sliding window"),
        ("llama", {"rope_dimension_count": 8}, "dimension_count"),
        ("llama", {"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "longrope"),
    ]:
        path = tmp_path / "m.gguf"
        path.unlink(missing_ok=True)
        write_gguf(path, model, arch, **fields)
        with pytest.raises(ValueError, match=message):
            heedful.load(path)


# --- files that lie --------------------------------------------------------------------------------------------------


def header(n_tensors: int = 0, n_fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_fields)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BAD = {
    "empty": b"",
    "no GGUF": b"GGML" + bytes(100),
    "cut after the magic": b"GGUF\x03\0",
    "old version": header(version=1) + bytes(100),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "absurd count of fields": header(0, 2**63),
    "absurd count of tensors": header(2**63, 0),
    "tensors that are not there": header(1000, 0),
    "text past the end": header(0, 1) + struct.pack("<Q", 2**62) + b"abc",
    "text that is no UTF-8": header(0, 1) + text(b"\xff\xfe") + struct.pack("<IB", 0, 1),
    "unknown type": header(0, 1) + text(b"a") + struct.pack("<I", 99),
    "absurd list": header(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 0, 2**60),
    "list past the end": header(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 10, 1000) + bytes(80),
    "list of lists": header(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(80),
    "field twice": header(0, 2) + (text(b"a") + struct.pack("<IB", 0, 1)) * 2,
    "alignment 0": header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
    "tensor twice": header(2, 0) + tensor(b"x", [8], 0, 0) + tensor(b"x", [8], 0, 32) + bytes(128),
    "overlap": header(2, 0) + tensor(b"x", [8], 0, 0) + tensor(b"y", [8], 0, 16) + bytes(128),
    "past the end": header(1, 0) + tensor(b"x", [8], 0, 2**40) + bytes(64),
    "too large": header(1, 0) + tensor(b"x", [2**30, 2**30], 0, 0) + bytes(64),
    "overflow": header(1, 0) + tensor(b"x", [2**62, 4], 0, 0) + bytes(64),
    "zero": header(1, 0) + tensor(b"x", [0], 0, 0) + bytes(64),
    "no dimension": header(1, 0) + tensor(b"x", [], 0, 0) + bytes(64),
    "many dimensions": header(1, 0) + tensor(b"x", [1] * 9, 0, 0) + bytes(64),
    "unknown quantization": header(1, 0) + tensor(b"x", [8], 99, 0) + bytes(64),
    "not a whole block": header(1, 0) + tensor(b"x", [33], int(Kind.Q4_0), 0) + bytes(64),
}  # fmt: skip


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_bad_files_are_refused(content, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        GgufFile(path)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        heedful.load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoiled_bytes_are_an_error_or_a_model(data, tmp_path):
    good = tmp_path / "good.gguf"
    if not good.exists():
        write_gguf(good, tiny_llama(n_layers=1), "llama", Kind.Q8_0)
    content = bytearray(good.read_bytes())
    description = content.index(b"token_embd") + 600
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, description))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(content))
    try:
        heedful.load(path)
    except (ValueError, OSError):
        pass


# --- the real one ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol():
    path = real_model("smollm2-135m-instruct")
    if path.is_dir():
        pytest.skip("SmolLM2 was pulled from the hub, in another format")
    return path, heedful.load(path)


def test_smollm2_knows_the_capital_of_france(smol):
    _, loaded = smol
    prompt = torch.tensor([loaded.tokenizer.encode("The capital of France is")])
    (ids,) = greedy_batch(loaded.model, Batch(prompt), 4)
    assert loaded.tokenizer.decode(ids).startswith(" Paris")
    assert loaded.model.n_parameters() == 134_515_008 and loaded.eos_ids == (2,)
    assert loaded.model.config.norm_eps == 1e-5


def capitals(loaded: heedful.Loaded) -> list[str]:
    """Greedy answers to five questions."""
    countries = ("France", "Italy", "Japan", "Egypt", "Norway")
    questions = [f"What is the capital of {country}?" for country in countries]
    return [r.choices[0].text for r in loaded.complete(questions, chat=True, temperature=0, max_tokens=6)]


def test_smollm2_quantized_answers_as_in_float32(smol):
    path, loaded = smol
    if library() is None:
        pytest.skip("without the C kernels, int8 and int4 are ATen's, whose scales and activations are bfloat16")
    expected = capitals(loaded)
    assert expected[0] == "The capital of France is Paris"
    for precision in ("int8", "int4"):
        assert capitals(heedful.load(path, quantize=precision)) == expected


def test_smollm2s_tensors_equal_the_packages_own(smol):
    path, _ = smol
    with GgufFile(path) as file:
        for theirs in gguf.GGUFReader(path).tensors[:40]:
            want = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            assert np.array_equal(file.get(theirs.name).numpy(), want.reshape(file.shape(theirs.name)))


def test_smollm2_gives_the_references_logits(smol):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    from transformers import AutoModelForCausalLM

    path, loaded = smol
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokens = torch.tensor([loaded.tokenizer.encode("The capital of France is Paris, and")])
    with torch.no_grad():
        assert (loaded.model(tokens).logits - reference.eval()(tokens).logits).abs().max() < 1e-4
