"""Choosing, compiling, checking and loading the C kernels, and what happens where there are none."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from heedful.kernels.cpu import library as kernels
from heedful.kernels.cpu import structs
from heedful.kernels.cpu.library import Status, _loaded, library, status
from heedful.kernels.cpu.targets import TARGETS, supported_targets

needs_kernels = pytest.mark.skipif(library() is None, reason=str(status()))

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
    if os.name == "nt":
        pytest.skip("these compilers are shell scripts")
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
def made(monkeypatch, tmp_path) -> Path:
    """The file that this process uses; what is loaded in the test finds no prebuilt one."""
    path = Path(library()._name)
    if not path.exists():
        pytest.skip("the cache folder is not writable")
    monkeypatch.setattr(kernels, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.delenv("HEEDFUL_KERNELS", raising=False)
    return path


@pytest.fixture
def quick(tmp_path, made) -> str:
    """The copying compiler."""
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
    assert str(said) == f"C kernels: {supported_targets()[0].instructions}, compiled by cc 1.2"
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
def test_a_failed_compile_is_told_once_in_the_compilers_words(tmp_path, monkeypatch, caplog, made):
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
def test_another_version_of_the_compiler_makes_another_file(tmp_path, monkeypatch, made):
    for version in "12.1", "12.2":
        script = COPY.format(kernels=made, version=version)
        load(monkeypatch, CC=compiler(tmp_path, script), XDG_CACHE_HOME=str(tmp_path))
    assert len(list((tmp_path / "heedful").iterdir())) == 2


def test_why_there_are_no_kernels(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(kernels, "PREBUILT", tmp_path)
    assert str(load(monkeypatch, HEEDFUL_KERNELS="0")).startswith("C kernels: not used: HEEDFUL_KERNELS=0")
    if library() is not None:
        none = load(monkeypatch, HEEDFUL_KERNELS="1", CC="/no/such/compiler", PATH="/nowhere")
        assert str(none) == "C kernels: not used: no C compiler (cc, gcc, clang) was found"
        assert status().available
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "sse4_2": True})
    assert "AVX2, AVX-512" in load(monkeypatch, HEEDFUL_KERNELS="1").reason
    assert not caplog.messages


@pytest.mark.parametrize(
    "wanted, reason", [("neon", "this processor has no NEON"), ("avx3", "there are 0 (off), avx512-vnni-bf16, ")]
)
def test_a_target_that_cannot_run_here_is_told_once(monkeypatch, caplog, wanted, reason):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx2": True})
    said = load(monkeypatch, HEEDFUL_KERNELS=wanted)
    (told,) = caplog.messages
    assert not said.available and reason in said.reason and reason in told and f"HEEDFUL_KERNELS={wanted}" in told


# What torch.cpu.get_capabilities says of some processors, as far as it matters, and the targets that they can run.
HASWELL = {"architecture": "x86_64"} | dict.fromkeys(("avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt", "popcnt"), True)
SKYLAKE_SERVER = HASWELL | dict.fromkeys(("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"), True)
ICE_LAKE = SKYLAKE_SERVER | {"avx512_vnni": True, "avx512_bf16": False}
ZEN_4 = ICE_LAKE | {"avx512_bf16": True}
GRAVITON_2 = {"architecture": "aarch64"} | dict.fromkeys(("neon", "dot", "fp16_arith"), True)
GRAVITON_3 = GRAVITON_2 | {"i8mm": True, "bf16": True, "sve": True, "sve_max_length": 256}
PROCESSORS = [
    ({"architecture": "x86_64", "avx": True, "f16c": True}, []),
    (HASWELL, ["avx2"]),
    (SKYLAKE_SERVER, ["avx512", "avx2"]),
    (ICE_LAKE, ["avx512", "avx2"]),
    (ZEN_4, ["avx512-vnni-bf16", "avx512", "avx2"]),
    ({"architecture": "aarch64", "neon": True}, []),  # a Raspberry Pi 4
    (GRAVITON_2, ["neon"]),
    (GRAVITON_3, ["neon-i8mm", "neon"]),
]


@pytest.mark.parametrize("capabilities, names", PROCESSORS)
def test_a_processor_gets_the_best_target_that_it_can_run(monkeypatch, capabilities, names):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert [target.name for target in supported_targets()] == names


@needs_kernels
def test_a_prebuilt_library_is_used_without_a_compiler(tmp_path, monkeypatch, made):
    best, *others = supported_targets()
    (tmp_path / "prebuilt").mkdir()
    nothing = {"CC": "", "PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    for target in (*reversed(others), best):
        shutil.copy(made, tmp_path / "prebuilt" / f"{target.name}{kernels.SUFFIX}")
        assert str(load(monkeypatch, **nothing)) == f"C kernels: {target.instructions}, prebuilt"
    for target in others:
        chosen = load(monkeypatch, HEEDFUL_KERNELS=target.name)
        assert chosen == Status(True, f"{target.instructions}, prebuilt")
    assert not (tmp_path / "heedful").exists()


@needs_kernels
def test_a_prebuilt_library_that_does_not_fit_is_compiled(tmp_path, monkeypatch, caplog, quick):
    (tmp_path / "prebuilt").mkdir()
    for target in TARGETS:
        (tmp_path / "prebuilt" / f"{target.name}{kernels.SUFFIX}").write_bytes(b"for another machine")
    assert load(monkeypatch, CC=quick, XDG_CACHE_HOME=str(tmp_path)).reason.endswith("compiled by cc 1.2")
    assert "cannot be used" in caplog.text


ONE_RUNTIME = """
import re
from heedful.kernels.cpu.library import library
library()
print(*{path for path in re.findall(r"/\\S*", open("/proc/self/maps").read()) if re.search("g?i?omp[^/]*[.]so", path)})
"""


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is loaded is not to be seen here")
def test_kernels_and_pytorch_share_one_openmp_runtime():
    done = subprocess.run([sys.executable, "-c", ONE_RUNTIME], capture_output=True, text=True, check=True).stdout
    assert len(done.split()) == 1


@needs_kernels
@pytest.mark.parametrize("damage", ["order", "size", "name", "version"])
def test_a_struct_that_differs_from_the_librarys_is_refused(monkeypatch, damage):
    fields = list(structs.NormWeights._fields_)
    if damage == "order":
        fields[0], fields[1] = fields[1], fields[0]
    elif damage == "size":
        fields.append(("more", ctypes.c_int64))
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
