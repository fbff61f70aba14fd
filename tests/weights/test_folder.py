"""Folders in the hub's layout: what is saved is what is loaded, by us and by the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoModelForCausalLM

import heedful
from heedful.models.base import Model
from heedful.weights.save import save
from support.folders import change_config, logits, saved, tiny_gpt, tiny_llama


def same(a: Model, b: Model) -> bool:
    ours, others = dict(a.named_parameters()), dict(b.named_parameters())
    return ours.keys() == others.keys() and all(torch.equal(ours[n], others[n]) for n in ours)


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
def test_saved_and_loaded_is_the_same_model(make, tmp_path):
    model = make()
    loaded = heedful.load(saved(tmp_path / "m", model))
    assert type(loaded.model) is type(model) and loaded.model.config == model.config
    assert same(loaded.model, model) and not loaded.model.training
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.tokenizer is None and loaded.name == "m"


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
@pytest.mark.parametrize("max_shard", [10**9, 40_000, 1])
def test_the_reference_loads_what_is_saved(make, max_shard, tmp_path):
    model = make()
    save(model, tmp_path / "m", max_shard=max_shard)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert (len(shards) == 1) == (max_shard == 10**9)
    if len(shards) > 1:
        index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {p.name for p in shards}
        assert index["metadata"]["total_size"] == 4 * model.n_parameters()
        assert max_shard == 1 or all(p.stat().st_size < max_shard + 2_000 for p in shards)
    reference, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (logits(reference.eval()) - logits(model)).abs().max() < 1e-5
    assert same(heedful.load(tmp_path / "m").model, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_of_the_weights_is_kept(dtype, tmp_path):
    model = tiny_gpt().to(dtype)
    folder = saved(tmp_path / "m", model)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {dtype}
    assert same(heedful.load(folder).model, model)
    assert {p.dtype for p in heedful.load(folder, dtype=torch.float32).model.parameters()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype


def test_mixed_types_become_the_one_of_most_numbers(tmp_path):
    folder = saved(tmp_path / "m", tiny_llama().half())
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.float() if t.ndim == 1 else t for n, t in tensors.items()}, folder / "model.safetensors")
    assert {p.dtype for p in heedful.load(folder).model.parameters()} == {torch.float16}


def test_integers_are_no_weights(tmp_path):
    folder = saved(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.to(torch.int8) for n, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="stored as int8"):
        heedful.load(folder)
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="quantized"):
        heedful.load(folder)


def test_special_tokens_survive(tmp_path):
    folder = saved(tmp_path / "a")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 5}
    change_config(folder, **ids)
    generation = {"eos_token_id": [2, 7], "temperature": 0.6, "forced_eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    first = heedful.load(folder)
    assert (first.bos_id, first.eos_ids, first.pad_id) == (1, (2, 7), 0)
    first.save(tmp_path / "b")
    second = heedful.load(tmp_path / "b")
    assert second.model.special == first.model.special
    assert second.model.generation == generation | {"bos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 5}
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["eos_token_id"] == [2, 7] and written["decoder_start_token_id"] == 5


def test_special_tokens_must_be_numbers(tmp_path):
    folder = saved(tmp_path / "m")
    change_config(folder, eos_token_id="</s>")
    with pytest.raises(ValueError, match="eos_token_id"):
        heedful.load(folder)


def test_families_without_a_hub_layout_keep_their_own(tmp_path):
    model = tiny_gpt(band=4)  # GPT-3's windows
    model.special = {"eos_token_id": 3}
    folder = saved(tmp_path / "m", model)
    written = json.loads((folder / "config.json").read_text())
    assert (written["model_type"], written["family"], written["band"]) == ("heedful", "gpt", 4)
    loaded = heedful.load(folder)
    assert loaded.model.config == model.config and same(loaded.model, model)
    assert loaded.eos_ids == (3,)
    change_config(folder, n_layer=2)
    with pytest.raises(ValueError, match="did you mean n_layers"):
        heedful.load(folder)


def test_a_tokenizer_travels_with_its_model(tmp_path):
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    save(tiny_gpt(), tmp_path / "m", heedful.Tokenizer(backend, roles={"unk": "<unk>"}))
    loaded = heedful.load(tmp_path / "m")
    assert loaded.tokenizer.encode("b a") == [2, 1]
    loaded.save(tmp_path / "n")
    assert heedful.load(tmp_path / "n").tokenizer.encode("b a") == [2, 1]


def test_a_folder_with_something_in_it_is_kept(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        save(tiny_gpt(), tmp_path / "m")
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"
    save(tiny_gpt(), tmp_path / "m", overwrite=True)
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == files
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    folder = saved(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("heedful.weights.save.save_file", full)
    for target in tmp_path / "m", tmp_path / "new":
        with pytest.raises(OSError, match="No space"):
            save(tiny_gpt(), target, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_save_that_is_killed_leaves_no_half_folder(tmp_path):
    """The process ends between the weights and the config, as SIGKILL would end it."""
    program = (
        "import os, sys, heedful.weights.save as s; from support.folders import tiny_gpt\n"
        "s._write_json = lambda *a: os.kill(os.getpid(), 9)\n"
        "s.save(tiny_gpt(), sys.argv[1])"
    )
    support = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-c", program, str(tmp_path / "m")]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": support}).returncode == -9
    assert not (tmp_path / "m").exists() and len(list(tmp_path.iterdir())) == 1  # what was written aside
    assert same(heedful.load(saved(tmp_path / "m")).model, tiny_llama())


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path):
    folder = saved(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.9.surprise"] = torch.zeros(2, 3)
    tensors["model.norm.weight"] = torch.zeros(63)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        heedful.load(folder)
    assert "missing    model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "extra      model.layers.9.surprise [2, 3]" in str(error.value)
    assert "misshapen  model.norm.weight: [63], expected [64]" in str(error.value)


def test_a_long_list_of_problems_is_cut(tmp_path):
    folder = saved(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"x{i}": torch.zeros(1) for i in range(500)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="and 460 more"):
        heedful.load(folder)
