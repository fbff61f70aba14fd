"""Files and arguments that nobody means: each is one clear line, never a traceback."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc

import pytest

from heedful.cli import main
from heedful.text import Tokenizer
from support.serving import saved

DEEP = "[" * 100_000


def adapter(folder, base):
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": 1,
        "lora_alpha": 1,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def said(capsys, *arguments):
    """What a command says as it refuses."""
    assert main([str(a) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_empty_names(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no family is called ''" in said(capsys, "models", "")
    assert "what to train on?" in said(capsys, "train", "")
    assert "is not the name" in said(capsys, "info", "")


def test_an_adapter_that_is_its_own_base(capsys, tmp_path):
    own = adapter(tmp_path / "own", tmp_path / "own")
    one = adapter(tmp_path / "one", tmp_path / "two")
    adapter(tmp_path / "two", tmp_path / "three")
    adapter(tmp_path / "three", tmp_path / "one")
    for folder in own, one:
        for command in ["generate", folder, "x"], ["info", folder]:
            assert "itself as its base" in said(capsys, *command)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_nested_too_deeply_in_a_model(name, capsys, tmp_path):
    folder = saved(tmp_path / "m")
    shutil.copytree(folder, tmp_path / "deep")
    (tmp_path / "deep" / name).write_text('{"a":' + DEEP)
    assert said(capsys, "generate", tmp_path / "deep", "x")


def test_nested_too_deeply_elsewhere(capsys, tmp_path):
    folder = saved(tmp_path / "m")
    header = b'{"a":' + DEEP.encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert said(capsys, "generate", folder, "x")
    lines = tmp_path / "deep.jsonl"
    lines.write_text(DEEP + "\n")
    assert said(capsys, "train", lines, "--out", tmp_path / "run")
    recipe = tmp_path / "deep.toml"
    recipe.write_text("a = " + "[" * 5_000 + "]" * 5_000)
    assert "nested" in said(capsys, "train", recipe, "--out", tmp_path / "run")
    assert said(capsys, "bias", "tiny", recipe)


@pytest.mark.parametrize("setting", ["train.steps=1e26", f"train.steps={10**26}", "train.batch_size=10000000000000000"])
def test_absurd_settings(setting, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("a b c " * 500)
    assert "steps" in (text := said(capsys, "train", tmp_path / "text.txt", "--set", setting)) or "batch_size" in text


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
def test_a_token_with_an_id_near_2_to_the_30(file, tmp_path):
    """Refused by its number, and before anything is made for every id below it."""
    vocab = {"a": 0, "b": 1, "ab": 10**9}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]}}
    content = tokenizer if file == "tokenizer.json" else vocab
    (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "merges.txt").write_text("a b\n")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="id 1,000,000,000"):
            Tokenizer.from_folder(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10**8
    finally:
        tracemalloc.stop()


def test_a_run_whose_checkpoints_are_all_damaged(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    sizes = "--set", "model.d_model=16", "--set", "model.n_layers=1", "--set", "model.n_heads=1", "--set"
    run = tmp_path / "run"
    settings = [*sizes, "model.family=gpt", "--set", "model.tied=true", "--set", "train.steps=2", "--quiet"]
    assert main(["train", str(tmp_path / "text.txt"), "--out", str(run), *settings]) == 0
    capsys.readouterr()
    for file in run.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    for command in ["generate", run, "x"], ["info", run], ["export", run, tmp_path / "out"]:
        text = said(capsys, *command)
        assert "every checkpoint" in text and "model.safetensors" in text and "--restart" in text
