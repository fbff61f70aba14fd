"""Compiling, checking and loading the C kernels, and what happens where there are none."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.kernels.cpu import structs
from heedful.kernels.cpu.library import library, status

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
STATUS = """
from heedful.kernels.cpu.library import library, prepare, status
library(), prepare()
print(status())
print(status().details)
"""


QUICK = 'exec gcc "$@" -O0'  # compiles in a second


def compiler(folder: Path, script: str) -> str:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", program], os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


def ask(**environment: str) -> list[str]:
    return run(PROGRAM, **environment).stdout.split()


def test_without_kernels_pytorch_does_the_work():
    assert ask(HEEDFUL_KERNELS="0")[0] == "False"
    assert ask(HEEDFUL_KERNELS="0")[1] in ("OneDnn", "Plain")
    assert ask(CC="/no/such/compiler", PATH="/nowhere")[0] == "False"


@needs_kernels
def test_kernels_are_compiled_once(tmp_path):
    assert ask(XDG_CACHE_HOME=str(tmp_path))[1] == "Float32Panels"
    (made,) = (tmp_path / "heedful").iterdir()
    before = made.stat().st_mtime_ns
    assert ask(XDG_CACHE_HOME=str(tmp_path))[0] == "True"
    assert [made] == list((tmp_path / "heedful").iterdir()) and made.stat().st_mtime_ns == before


@needs_kernels
def test_without_a_place_for_them_kernels_still_run():
    assert ask(XDG_CACHE_HOME="/proc/no/such/folder")[0] == "True"


@needs_kernels
def test_nothing_stays_in_the_temporary_folder(tmp_path):
    quick = compiler(tmp_path, QUICK)
    for cache in str(tmp_path / "cache"), "/proc/no/such/folder":
        (tmp_path / "tmp").mkdir(exist_ok=True)
        said = run(STATUS, CC=quick, XDG_CACHE_HOME=cache, TMPDIR=str(tmp_path / "tmp")).stdout
        assert said.startswith("C kernels: AVX-512 with BF16 and VNNI, compiled by ")
        assert list((tmp_path / "tmp").iterdir()) == []


@needs_kernels
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_file_in_the_cache_is_made_anew(tmp_path, damage):
    quick = compiler(tmp_path, QUICK)
    run(STATUS, CC=quick, XDG_CACHE_HOME=str(tmp_path))
    (made,) = (tmp_path / "heedful").iterdir()
    whole = made.read_bytes()
    changed = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    made.write_bytes({"truncated": whole[: len(whole) // 2], "changed": changed, "empty": b""}[damage])
    assert "compiled by" in run(STATUS, CC=quick, XDG_CACHE_HOME=str(tmp_path)).stdout
    assert [made] == list((tmp_path / "heedful").iterdir()) and len(made.read_bytes()) == len(whole)


@needs_kernels
def test_a_failed_compile_is_told_once_in_the_compilers_words(tmp_path):
    broken = compiler(
        tmp_path, 'case "$*" in *--version*) echo "mycc 1.2";; *) echo "x.c:1: error: no luck" >&2; exit 1;; esac'
    )
    done = run(STATUS, CC=broken, XDG_CACHE_HOME=str(tmp_path))
    assert done.stderr.count("\n") == 1 and "no luck" in done.stderr and "C kernels: not used" in done.stderr
    first, *details = done.stdout.splitlines()
    assert "error: no luck" in first and len(details) > 3
    assert not (tmp_path / "heedful").exists() or list((tmp_path / "heedful").iterdir()) == []


@needs_kernels
def test_another_version_of_the_compiler_makes_another_file(tmp_path):
    for version in "12.1", "12.2":
        script = f'case "$*" in *--version*) echo "mycc {version}";; *) {QUICK};; esac'
        run(STATUS, CC=compiler(tmp_path, script), XDG_CACHE_HOME=str(tmp_path))
    assert len(list((tmp_path / "heedful").iterdir())) == 2


def test_why_there_are_no_kernels():
    off = run(STATUS, HEEDFUL_KERNELS="0")
    assert off.stdout.startswith("C kernels: not used: HEEDFUL_KERNELS=0") and off.stderr == ""
    if library() is not None:
        none = run(STATUS, CC="/no/such/compiler", PATH="/nowhere")
        assert none.stdout.startswith("C kernels: not used: no C compiler (cc, gcc, clang) was found")
        assert status().available and str(status()).startswith("C kernels: AVX-512")


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
def test_kernels_with_another_layout_are_not_used():
    program = "from heedful.kernels.cpu import structs; structs.ABI_VERSION += 1" + STATUS
    done = run(program)
    assert done.stdout.startswith("C kernels: not used") and "ABI version" in done.stderr
