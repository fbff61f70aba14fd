"""Folders and names from people who mean no good, or made a mistake."""

from __future__ import annotations

import json
import os
import sys

import pytest

import heedful
from heedful.weights.folder import LARGEST_CONFIG
from heedful.weights.resolve import resolve_model_in
from support.folders import change_config, saved, tiny_gpt, tiny_llama


def test_code_that_a_config_names_is_not_imported(tmp_path, monkeypatch):
    folder = saved(tmp_path / "m")
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change_config(folder, auto_map=auto, custom_pipelines={"x": {"impl": "evil.P"}}, trust_remote_code=True)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    heedful.load(folder)
    change_config(folder, model_type="evil")
    with pytest.raises(ValueError, match="'evil' is not known"):
        heedful.load(folder)
    change_config(folder, model_type="heedful", family="evil")
    with pytest.raises(ValueError):
        heedful.load(folder)
    assert "evil" not in sys.modules


SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
ABSURD = [-1, 0, 10**9 + 7, 10**30, float("nan"), float("inf"), 1e9, 2.5, "64", True, [64], {"n": 64}]


@pytest.mark.parametrize("value", ABSURD, ids=str)
@pytest.mark.parametrize("key", SIZES)
def test_absurd_sizes_are_refused_before_anything_is_built(key, value, tmp_path, monkeypatch):
    folder = saved(tmp_path / "m")
    change_config(folder, **{key: value})

    def built(*args, **kwargs):
        raise AssertionError("a module was built")

    monkeypatch.setattr("heedful.nn.stack.Stack.__init__", built)
    with pytest.raises(ValueError):
        heedful.load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": "1e-5"},
        {"rms_norm_eps": None, "hidden_act": ["silu"]},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "no"},
        {"rope_parameters": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_type": "linear", "factor": "much"}},
        {"rope_parameters": {"rope_type": "linear", "factor": float("inf")}},
        {"rope_parameters": "default"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"model_type": {}},
        {"hidden_act": "softsquare"},
        {"attention_bias": True},
    ],
    ids=lambda c: str(c)[:60],
)
def test_wrong_settings_are_a_value_error(changes, tmp_path):
    folder = saved(tmp_path / "m")
    change_config(folder, **changes)
    with pytest.raises(ValueError):
        heedful.load(folder)


@pytest.mark.parametrize("family", ["gpt", ["gpt"], None, 7])
def test_wrong_settings_in_our_own_layout(family, tmp_path):
    folder = saved(tmp_path / "m", tiny_gpt(band=3))
    change_config(folder, family=family, n_layers="two")
    with pytest.raises(ValueError):
        heedful.load(folder)


def test_a_missing_model_type_is_named(tmp_path):
    folder = saved(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type"):
        heedful.load(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"7", b'"llama"', b"{", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5,
     b'{"hidden_size": ' + b"9" * 5000],
    ids=lambda c: repr(c[:8]),
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_none(name, content, tmp_path):
    folder = saved(tmp_path / "m")
    if name.startswith("model"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        heedful.load(folder)


def test_a_config_of_a_gigabyte_is_not_read(tmp_path):
    folder = saved(tmp_path / "m")
    os.truncate(folder / "config.json", 10**9)  # sparse
    with pytest.raises(ValueError, match=str(LARGEST_CONFIG)):
        heedful.load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("how", ["absolute", "relative", "folder", "pipe"])
def test_only_plain_files_in_the_folder_are_read(name, how, tmp_path):
    folder, elsewhere = saved(tmp_path / "m"), saved(tmp_path / "elsewhere")
    (elsewhere / "generation_config.json").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(folder / name)
    elif how == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(elsewhere / name if how == "absolute" else f"../elsewhere/{name}")
    with pytest.raises(ValueError, match="outside the folder" if how in ("absolute", "relative") else "plain file"):
        heedful.load(folder)


def test_links_within_the_folder_are_fine(tmp_path):
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    heedful.load(folder)
    (tmp_path / "alias").symlink_to(folder)
    heedful.load(tmp_path / "alias")


@pytest.mark.parametrize(
    "shard",
    ["../other/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "..\\x.safetensors", "x\0.safetensors",
     "shard.bin", "C:x.safetensors", "gone.safetensors", 7, None, ["a.safetensors"]],
    ids=repr,
)  # fmt: skip
def test_a_shard_index_cannot_lead_elsewhere(shard, tmp_path):
    folder, other = saved(tmp_path / "m"), saved(tmp_path / "other")
    assert other.exists()
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError):
        heedful.load(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}], ids=str)
def test_an_index_without_a_map(index, tmp_path):
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="weight_map"):
        heedful.load(folder)


def test_folders_that_hold_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        heedful.load(tmp_path / "empty")
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(ValueError, match=r"only weights\.safetensors"):
        heedful.load(folder)
    with pytest.raises(ValueError, match="give its folder"):
        heedful.load(folder / "weights.safetensors")


@pytest.mark.parametrize(
    "name",
    ["", "\0", "a\0b", "no-such-model", "../x/y", "/no/such/folder", "a/b/c", "a/..", "gone.gguf", "x.bin"],
)
def test_names_that_mean_nothing(name, monkeypatch):
    monkeypatch.setattr("heedful.weights.hub.download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ValueError):
        heedful.load(name)


def test_a_size_without_weights_says_how_to_make_one():
    with pytest.raises(ValueError, match=r"heedful\.create\('gpt2-xl'\)"):
        heedful.load("gpt2-xl")


OUTSIDE = ["..", ".", "", "../secret", "/etc", "a/../../secret", "%2e%2e", "%2e%2e%2fsecret", "..%2fsecret", "secret\0",
           "\0", "a\\..\\secret", "link", "~", "C:", "m/", "m\n", ".hidden", "x" * 500, "m/../m"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_a_name_from_others_stays_in_the_folder_of_models(name, tmp_path):
    root = tmp_path / "models"
    saved(root / "m", tiny_llama(n_layers=1))
    saved(tmp_path / "secret", tiny_llama(n_layers=1))
    (root / "link").symlink_to(tmp_path / "secret")
    (root / ".hidden").mkdir()
    with pytest.raises(LookupError):
        resolve_model_in(root, name)
    assert resolve_model_in(root, "m") == root / "m"
