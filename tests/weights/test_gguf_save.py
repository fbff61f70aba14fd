"""GGUF files that we write: read with llama.cpp's own package, and by ours with the same logits."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

import heedful
from heedful.cli import main
from heedful.kernels.accelerate import accelerate
from heedful.kernels.quantize import QuantizedWeight, keep_integers, kept_integers, quantize_weight
from heedful.loaded import Loaded
from heedful.models.base import Model
from heedful.models.bert import Bert, BertConfig
from heedful.models.gemma import Gemma, GemmaConfig
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.gpt_j import GPTJ, GPTJConfig
from heedful.models.gpt_neo import GPTNeo, GPTNeoConfig
from heedful.models.gpt_neox import GPTNeoX, GPTNeoXConfig
from heedful.models.llama import Llama, LlamaConfig
from heedful.models.mapping import to_hub
from heedful.models.mistral import Mistral, MistralConfig
from heedful.models.mixtral import Mixtral, MixtralConfig
from heedful.models.olmo import Olmo, OlmoConfig
from heedful.models.phi import Phi, PhiConfig
from heedful.models.qwen import Qwen, QwenConfig
from heedful.text import train_bpe
from heedful.weights import gguf_save
from heedful.weights.gguf import load_gguf
from heedful.weights.gguf_save import pack_blocks, save_gguf
from support.folders import logits, tiny_gpt, tiny_llama
from support.ggufs import Kind, gguf_name, interleave_heads

SIZES = dict(d_model=64, n_layers=2, n_heads=4, vocab_size=80, max_len=64)
GROUPED = dict(**SIZES, n_kv_heads=2, d_ff=96)
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA_2 = dict(d_head=32, after_norms=True, query_scale=32.0, score_cap=50.0, logit_cap=30.0, window=4)
FAMILIES: dict[str, tuple[str, type[Model], Any]] = {
    "gpt2": ("gpt2", GPT, GPTConfig(**SIZES, act="gelu_pytorch_tanh")),
    "gptneox": ("gptneox", GPTNeoX, GPTNeoXConfig(**SIZES, d_ff=96, act="gelu_fast")),
    "gptneox-tied": ("gptneox", GPTNeoX, GPTNeoXConfig(**SIZES, d_ff=96, parallel=False, tied=True)),
    "llama": ("llama", Llama, LlamaConfig(**GROUPED)),
    "llama3.2": ("llama", Llama, LlamaConfig(**GROUPED, d_head=32, scaling=LLAMA_3, theta=5e5, tied=True)),
    "llama-yarn": ("llama", Llama, LlamaConfig(**GROUPED, scaling=YARN)),
    "llama-linear": ("llama", Llama, LlamaConfig(**GROUPED, scaling={"rope_type": "linear", "factor": 2.0})),
    "mistral": ("llama", Mistral, MistralConfig(**GROUPED)),
    "mixtral": ("llama", Mixtral, MixtralConfig(**GROUPED, n_experts=3)),
    "qwen2": ("qwen2", Qwen, QwenConfig(**GROUPED)),
    "qwen3": ("qwen3", Qwen, QwenConfig(**GROUPED, d_head=32, head_norms=True, tied=True)),
    "gemma": ("gemma", Gemma, GemmaConfig(**GROUPED, d_head=32)),
    "gemma2": ("gemma2", Gemma, GemmaConfig(**GROUPED, **GEMMA_2)),
    "phi3": ("phi3", Phi, PhiConfig(**GROUPED)),
    "phi3-longrope": ("phi3", Phi, PhiConfig(**GROUPED, scaling=LONGROPE)),
    "phi4-mini": ("phi3", Phi, PhiConfig(**GROUPED, rotary_share=0.75, tied=True)),
    "olmo2": ("olmo2", Olmo, OlmoConfig(**GROUPED, tied=True)),
}


def random_model(kind: type[Model], config: Any) -> Any:
    torch.manual_seed(0)
    model = kind.create(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.15)
    return model


def expected_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of the tensors on the hub, by the names of its package."""
    c, found = model.config, {}
    for name, tensor in to_hub(model.weight_map(), {n: p.detach() for n, p in model.named_parameters()}):
        x = tensor.numpy()
        if arch == "gpt2" and ".h." in name and x.ndim == 2:
            x = x.T
        if "query_key_value" in name:
            x = x.reshape(c.n_heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            x = interleave_heads(x, c.n_heads if ".q_proj." in name else c.n_kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            x = x + 1
        if ".experts." in name:  # of all experts, one after the other
            head, _, rest = name.partition(".experts.")
            found.setdefault(gguf_name(f"{head}.experts.{rest.split('.')[1]}.weight", arch, c.n_layers), []).append(x)
        else:
            found[gguf_name(name, arch, c.n_layers)] = x
    return {name: np.stack(x) if isinstance(x, list) else x for name, x in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpps_package_reads_it_and_so_do_we(family, tmp_path):
    arch, kind, config = FAMILIES[family]
    model = random_model(kind, config)
    model.special = {"bos_token_id": 1, "eos_token_id": [2, 5]}
    save_gguf(model, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.architecture"].contents() == arch
    assert reader.fields[f"{arch}.block_count"].contents() == 2
    stored = {t.name: t.data for t in reader.tensors if not t.name.startswith("rope_f")}
    expected = expected_tensors(model, arch)
    if family in ("gptneox-tied", "olmo2"):  # llama.cpp has them only with a head
        expected["output.weight"] = expected["token_embd.weight"]
    assert stored.keys() == expected.keys()
    assert all(np.array_equal(stored[name], expected[name]) for name in expected)

    loaded = heedful.load(tmp_path / "m.gguf")
    assert (loaded.bos_id, loaded.eos_ids, loaded.tokenizer) == (1, (2, 5), None)
    assert (logits(loaded.model) - logits(model)).abs().max() < 1e-5  # (norm + 1) - 1 rounds


def test_types_of_the_weights(tmp_path):
    model = random_model(Mixtral, FAMILIES["mixtral"][2])
    for dtype, kind in {"float16": Kind.F16, "bfloat16": Kind.BF16, "int8": Kind.Q8_0, "int4": Kind.Q4_1}.items():
        save_gguf(model, tmp_path / f"{dtype}.gguf", dtype=dtype)
        kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / f"{dtype}.gguf").tensors}
        assert kinds["blk.0.ffn_up_exps.weight"] == kinds["blk.1.attn_q.weight"] == kind
        assert kinds["token_embd.weight"] == (Kind.Q8_0 if dtype == "int4" else kind)
        assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.ffn_gate_inp.weight"] == Kind.F32
        loaded = heedful.load(tmp_path / f"{dtype}.gguf", dtype=torch.float32).model
        assert 0 < (logits(loaded) - logits(model)).abs().max() < 0.5 * logits(model).std()
    model.half()
    save_gguf(model, tmp_path / "m.gguf")
    assert torch.equal(heedful.load(tmp_path / "m.gguf").model.head.weight, model.head.weight)


def test_blocks_mean_what_the_package_says():
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    for precision, kind in (("int8", Kind.Q8_0), ("int4", Kind.Q4_1)):
        quantized = quantize_weight(weight, precision)
        stored = gguf.quants.dequantize(pack_blocks(quantized), kind)
        assert np.array_equal(stored, quantized.dequantize().numpy())


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_files_give_the_model_that_is_quantized_in_memory(precision, tmp_path):
    for family in ("llama", "gpt2", "mixtral"):
        model = random_model(*FAMILIES[family][1:])
        file = tmp_path / f"{family}.gguf"
        save_gguf(model, file, dtype=precision)
        kernels = accelerate(model, "inference", precision=precision)
        assert torch.equal(logits(heedful.load(file, quantize=precision).model), logits(kernels))


def test_integers_that_a_weight_keeps_are_written_as_they_are(tmp_path):
    model = tiny_llama()
    weight = model.decoder.blocks[0].feedforward.down.weight
    ints = torch.randint(3, 12, weight.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.full((len(weight), weight.shape[1] // 32), 0.25, dtype=torch.float16)
    quantized = QuantizedWeight(ints, scale, torch.full_like(scale, 0.5))
    with torch.no_grad():
        weight.copy_(quantized.dequantize())
    keep_integers(weight, quantized)
    save_gguf(model, tmp_path / "m.gguf", dtype="int4")
    (stored,) = [t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.0.ffn_down.weight"]
    assert np.array_equal(gguf.quants.dequantize(stored.data, Kind.Q4_1), weight.detach().numpy())
    again, _ = load_gguf(tmp_path / "m.gguf", integers=True)  # of groups in which the largest integers do not occur
    kept = kept_integers(again.decoder.blocks[0].feedforward.down.weight, "int4")
    assert kept is not None and torch.equal(kept.ints, ints) and torch.equal(kept.scale, scale)


def test_a_context_ends_with_a_window_that_llama_cpp_does_not_have(tmp_path):
    model = random_model(Mistral, MistralConfig(**GROUPED, window=16))
    with pytest.warns(UserWarning, match="16 tokens"):
        save_gguf(model, tmp_path / "m.gguf")
    loaded = heedful.load(tmp_path / "m.gguf").model
    assert loaded.context_length == 16 and torch.equal(logits(loaded), logits(model))


REFUSED = {
    "gptj": (GPTJ, GPTJConfig(**SIZES, d_rotary=8), "gptj"),
    "gpt_neo": (GPTNeo, GPTNeoConfig(**SIZES), "gpt_neo"),
    "bert": (Bert, BertConfig(d_model=32, n_layers=1, n_heads=2, d_ff=32, vocab_size=40, max_len=16), "bert"),
    "gpt1": (GPT, GPTConfig(**SIZES, norm_first=False), "openai-gpt"),
    "gpt3": (GPT, GPTConfig(**SIZES, band=8), "banded"),
    "relu": (GPT, GPTConfig(**SIZES, act="relu"), "relu"),
    "no biases": (GPTNeoX, GPTNeoXConfig(**SIZES, d_ff=96, attention_bias=False), "biases"),
    "untied": (Gemma, GemmaConfig(**GROUPED, tied=False), "embedding"),
    "no caps": (Gemma, GemmaConfig(**GROUPED, after_norms=True), "caps"),
    "scale": (Gemma, GemmaConfig(**{**GROUPED, **GEMMA_2, "query_scale": 7.0}), "scale"),
    "head size": (Olmo, OlmoConfig(**GROUPED, d_head=32), "heads of 32"),
    "llama3 rope": (Llama, LlamaConfig(**GROUPED, scaling={**LLAMA_3, "low_freq_factor": 2.0}), "LLaMA 3's"),
    "qwen's llama3 rope": (Qwen, QwenConfig(**GROUPED, scaling=LLAMA_3), "LLaMA 3's"),
    "yarn": (Llama, LlamaConfig(**GROUPED, scaling={**YARN, "attention_factor": 2.0}), "YaRN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_have_is_refused(case, tmp_path):
    kind, config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        save_gguf(random_model(kind, config), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_writing_is_atomic(tmp_path, monkeypatch):
    model, file = tiny_gpt(), tmp_path / "m.gguf"
    file.write_text("precious")
    with pytest.raises(ValueError, match="exists"):
        save_gguf(model, file)
    real, calls = gguf_save.plain_array, []

    def fail_in_the_middle(*arguments):
        calls.append(list(tmp_path.iterdir()))
        if len(calls) == 5:
            raise OSError("no space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_save, "plain_array", fail_in_the_middle)
        with pytest.raises(OSError, match="no space"):
            save_gguf(model, file, overwrite=True)
    assert len(calls[-1]) == 2 and list(tmp_path.iterdir()) == [file] and file.read_text() == "precious"
    save_gguf(model, file, overwrite=True)
    assert torch.equal(logits(heedful.load(file).model), logits(model))


def test_packed_models_and_large_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="packed"):
        save_gguf(heedful.load("tiny", quantize="float32").model, tmp_path / "m.gguf")
    model = tiny_gpt()
    model.embed.weight.data[0, 0] = 1e6
    with pytest.raises(ValueError, match="float16"):
        save_gguf(model, tmp_path / "m.gguf", dtype="float16")
    with pytest.raises(ValueError, match="float64"):
        save_gguf(model.double(), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_a_model_comes_back_with_its_tokenizer(tmp_path):
    tokenizer = train_bpe(["the cat sat on the mat"] * 4, 270, special=["<|endoftext|>", "<|im_end|>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    loaded = Loaded(tiny_llama(vocab_size=300), tokenizer, "little")  # rows without a token
    loaded.save_gguf(tmp_path / "m.gguf")
    again = heedful.load(tmp_path / "m.gguf")
    assert again.tokenizer is not None and again.tokenizer.chat_template == tokenizer.chat_template
    assert again.generate("the cat", temperature=0, max_tokens=5) == loaded.generate(
        "the cat", temperature=0, max_tokens=5
    )
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["general.name"].contents() == "little"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 300


def test_the_command(tmp_path, capsys):
    file = tmp_path / "tiny.gguf"
    assert main(["export", "tiny", "--gguf", str(file), "--dtype", "float16"]) == 0
    assert "written to" in capsys.readouterr().out
    assert heedful.load(file).model.head.weight.dtype == torch.float16
    assert main(["export", "tiny", "--gguf", str(file)]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main(["export", "tiny", "--gguf", str(file), "--overwrite"]) == 0
    assert heedful.load(file).model.head.weight.dtype == torch.float32
    assert main(["export", "bert-books", "--gguf", str(tmp_path / "b.gguf")]) == 2
    assert "bert" in capsys.readouterr().err
    assert main(["export", "tiny"]) == 2 and "--gguf" in capsys.readouterr().err
