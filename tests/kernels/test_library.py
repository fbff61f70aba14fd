"""Compiling, checking and loading the C kernels, and what happens where there are none."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from heedful.kernels.cpu import structs
from heedful.kernels.cpu.library import Status, _loaded, library, status

needs_kernels = pytest.mark.skipif(
    library() is None, reason="our kernels need Linux, AVX-512 with VNNI and BF16, and a C compiler"
)

PROGRAM = """
import torch
from heedful.kernels.cpu.library import library
from heedful.kernels import packed
weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0))
kinds = [type(packed.pack_weight(weight, None, kind)).__name__ for kind in packed.PLAIN]
print(library() is not None, *kinds)
"""
# A compiler in no time: what it links is the library that this process uses.
COPY = """case "$*" in *--version*) echo "mycc {version}"; exit;; esac
for last; do :; done
case "$*" in *-shared*) cp {kernels} "$last";; *) : > "$last";; esac"""


def compiler(folder: Path, script: str) -> str:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def load(monkeypatch, **environment: str) -> Status:
    """The status of a start with this environment; the library that this process uses stays as it is."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return _loaded.__wrapped__()[1]


@pytest.fixture
def quick(tmp_path) -> str:
    """The copying compiler."""
    made = Path(library()._name)
    if not made.exists():
        pytest.skip("the cache folder is not writable")
    return compiler(tmp_path, COPY.format(kernels=made, version="1.2"))


def test_without_kernels_pytorch_does_the_work():
    command, env = [sys.executable, "-c", PROGRAM], os.environ | {"HEEDFUL_KERNELS": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert done[0] == "False" and done[1] in ("OneDnn", "Plain")


@needs_kernels
def test_kernels_are_compiled_once(tmp_path, monkeypatch, quick):
    assert load(monkeypatch, CC=quick, XDG_CACHE_HOME=str(tmp_path)).available
    (made,) = (tmp_path / "heedful").iterdir()
    before = made.stat().st_mtime_ns
    assert load(monkeypatch).available
    assert [made] == list((tmp_path / "heedful").iterdir()) and made.stat().st_mtime_ns == before


@needs_kernels
@pytest.mark.parametrize("cache", ["cache", "/proc/no/such/folder"])
def test_nothing_stays_in_the_temporary_folder(tmp_path, monkeypatch, quick, cache):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    said = load(monkeypatch, CC=quick, XDG_CACHE_HOME=str(tmp_path / cache))
    assert str(said) == "C kernels: AVX-512 with BF16 and VNNI, compiled by cc 1.2"
    assert list((tmp_path / "tmp").iterdir()) == []


@needs_kernels
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_file_in_the_cache_is_made_anew(tmp_path, monkeypatch, quick, damage):
    load(monkeypatch, CC=quick, XDG_CACHE_HOME=str(tmp_path))
    (made,) = (tmp_path / "heedful").iterdir()
    whole = made.read_bytes()
    changed = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    made.unlink()  # its pages are mapped
    made.write_bytes({"truncated": whole[: len(whole) // 2], "changed": changed, "empty": b""}[damage])
    assert load(monkeypatch).available
    assert [made] == list((tmp_path / "heedful").iterdir()) and made.read_bytes() == whole


@needs_kernels
def test_a_failed_compile_is_told_once_in_the_compilers_words(tmp_path, monkeypatch, caplog):
    broken = compiler(
        tmp_path, 'case "$*" in *--version*) echo "mycc 1.2";; *) echo "x.c:1: error: no luck" >&2; exit 1;; esac'
    )
    with caplog.at_level(logging.WARNING):
        said = load(monkeypatch, CC=broken, XDG_CACHE_HOME=str(tmp_path))
    (told,) = caplog.messages
    assert "\n" not in told and "no luck" in told and told.startswith("C kernels: not used")
    assert "error: no luck" in said.reason and len(said.details.splitlines()) > 3
    assert list((tmp_path / "heedful").iterdir()) == []


@needs_kernels
def test_another_version_of_the_compiler_makes_another_file(tmp_path, monkeypatch, quick):
    for version in "12.1", "12.2":
        script = COPY.format(kernels=library()._name, version=version)
        load(monkeypatch, CC=compiler(tmp_path, script), XDG_CACHE_HOME=str(tmp_path))
    assert len(list((tmp_path / "heedful").iterdir())) == 2


def test_why_there_are_no_kernels(monkeypatch, caplog):
    assert str(load(monkeypatch, HEEDFUL_KERNELS="0")).startswith("C kernels: not used: HEEDFUL_KERNELS=0")
    if library() is not None:
        none = load(monkeypatch, HEEDFUL_KERNELS="1", CC="/no/such/compiler", PATH="/nowhere")
        assert str(none) == "C kernels: not used: no C compiler (cc, gcc, clang) was found"
        assert status().available and str(status()).startswith("C kernels: AVX-512")
    assert not caplog.messages


@needs_kernels
@pytest.mark.parametrize("damage", ["order", "size", "name", "version"])
def test_a_struct_that_differs_from_the_librarys_is_refused(monkeypatch, damage):
    fields = list(structs.NormWeights._fields_)
    if damage == "order":
        fields[0], fields[1] = fields[1], fields[0]
    elif damage == "size":
        fields.append(("more", ctypes.c_long))
    else:
        fields[-1] = ("epsilon", ctypes.c_double)

    class NormWeights(ctypes.Structure):
        _fields_ = fields

    structs.check_layouts(library())
    if damage == "version":
        monkeypatch.setattr(structs, "ABI_VERSION", structs.ABI_VERSION + 1)
    else:
        others = [NormWeights if s is structs.NormWeights else s for s in structs.STRUCTS]
        monkeypatch.setattr(structs, "STRUCTS", others)
    with pytest.raises(ValueError, match="ABI version" if damage == "version" else "NormWeights"):
        structs.check_layouts(library())


@needs_kernels
def test_kernels_with_another_layout_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(structs, "ABI_VERSION", structs.ABI_VERSION + 1)
    assert not load(monkeypatch).available
    assert "ABI version" in caplog.text
