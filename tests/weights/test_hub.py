"""Ids of the hub, without a network: a cache laid out as huggingface_hub does it, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

import heedful
from heedful.weights import hub
from support.folders import logits, saved, tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, name: str = "models--org--tiny") -> Path:
    """A model in the cache's layout: contents in blobs, names in snapshots linked to them."""
    repository = cache / name
    snapshot = repository / "snapshots" / COMMIT
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    saved(snapshot)
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repository / "blobs" / f"blob{i}")
        path.symlink_to(f"../../blobs/blob{i}")
    return snapshot


@pytest.fixture
def fake(monkeypatch):
    """Stands in for the download: remembers how it was called, answers as it is told."""
    calls = []

    def set_answer(answer):
        def snapshot_download(name, **options):
            calls.append((name, options))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return set_answer


def test_a_model_of_the_hub(fake, tmp_path):
    calls = fake(cached(tmp_path))
    loaded = heedful.load("org/tiny")
    assert loaded.name == "org/tiny" and torch.equal(logits(loaded.model), logits(tiny_llama()))
    ((name, options),) = calls
    assert name == "org/tiny"
    wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
              "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "merges.txt", "source.spm",
              "chat_template.jinja", "generation_config.json", "1_Pooling/config.json"]  # fmt: skip
    unwanted = ["pytorch_model.bin", "model.pt", "modeling_evil.py", "tf_model.h5", "flax_model.msgpack", "model.onnx",
                "onnx/model.onnx", "original/consolidated.00.pth", "consolidated.safetensors", "x.pkl", "run.sh",
                "rust_model.ot", "training_args.bin"]  # fmt: skip
    chosen = set(
        huggingface_hub.utils.filter_repo_objects(
            [*wanted, *unwanted],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
    )
    assert chosen == set(wanted)


def test_the_cache_is_used_without_a_network(tmp_path):
    """huggingface_hub itself, in a process of its own: it reads these variables when it is imported."""
    cached(tmp_path)
    program = "import heedful; print(heedful.load('org/tiny').model.n_parameters())"
    settings = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tiny_llama().n_parameters())], done.stderr
    program = program.replace("org/tiny", "org/other")
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "ValueError: 'org/other' is no folder here" in done.stderr
    assert "hf download org/other" in done.stderr and "HF_HUB_CACHE" in done.stderr


def test_links_in_the_cache_stay_in_their_own_repository(fake, tmp_path):
    snapshot = cached(tmp_path)
    other = cached(tmp_path, "models--org--other")
    for target in other / "config.json", tmp_path / "models--org--other" / "blobs" / "blob0":
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        with pytest.raises(ValueError, match="outside the folder"):
            heedful.load(snapshot)


def test_a_folder_that_only_looks_like_the_cache(tmp_path):
    """.../snapshots/x in someone's download does not open the folder above it."""
    folder = saved(tmp_path / "snapshots" / "x")
    (tmp_path / "blobs").mkdir()
    (folder / "config.json").rename(tmp_path / "blobs" / "c")
    (folder / "config.json").symlink_to("../../blobs/c")
    with pytest.raises(ValueError, match="outside the folder"):
        heedful.load(folder)


def response(status: int):
    import httpx2

    return httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/org/tiny"))


ERRORS = {
    "offline": (lambda: errors.LocalEntryNotFoundError("not in the cache"), "cannot be reached"),
    "told to be offline": (lambda: errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), "hf download org/tiny"),
    "no network": (lambda: ConnectionError("no route to host"), "no route to host"),
    "disk full": (lambda: OSError(28, "No space left on device"), "No space left"),
    "unknown": (lambda: errors.RepositoryNotFoundError("404", response=response(404)), "no model 'org/tiny'"),
    "gated": (lambda: errors.GatedRepoError("403", response=response(403)), "license"),
    "revision": (lambda: errors.RevisionNotFoundError("404", response=response(404)), "no revision"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_goes_wrong_says_what_to_do(kind, fake):
    pytest.importorskip("httpx2")
    make, message = ERRORS[kind]
    fake(make())
    with pytest.raises(ValueError, match=message):
        heedful.load("org/tiny")


def test_a_folder_comes_before_the_hub(fake, tmp_path, monkeypatch):
    calls = fake(errors.OfflineModeIsEnabled("offline"))
    saved(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert heedful.load("org/tiny").name == "tiny" and not calls


def test_a_model_that_ships_comes_before_a_folder(tmp_path, monkeypatch):
    saved(tmp_path / "zoo" / "shipped", tiny_llama(n_layers=1))
    saved(tmp_path / "here" / "shipped")
    zoo = tmp_path / "zoo" / "shipped"
    monkeypatch.setattr("heedful.weights.resolve.shipped_models", lambda: {"shipped": zoo})
    monkeypatch.chdir(tmp_path / "here")
    assert heedful.load("shipped").model.config.n_layers == 1
    assert heedful.load("./shipped").model.config.n_layers == 2
    assert heedful.load(Path("shipped")).model.config.n_layers == 2


@pytest.mark.parametrize("name", ["org/name", "a/b", "HuggingFaceTB/SmolLM2-135M", "x1/y_z.2"])
def test_ids(name):
    assert hub.is_id(name)


@pytest.mark.parametrize(
    "name",
    ["name", "a/b/c", "../b", "a/..", "/a/b", "a/", "/b", "a/b\0", "a b/c", "a/b\n", "a/.b", "a/b..c", "é/b", "a//b"],
)  # fmt: skip
def test_what_is_no_id(name):
    assert not hub.is_id(name)


def test_a_snapshot_that_is_not_whole(fake, tmp_path):
    snapshot = cached(tmp_path)
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    fake(snapshot)
    with pytest.raises(ValueError, match=r"has no model-00001-of-00002\.safetensors"):
        heedful.load("org/tiny")
