"""Compiling and loading the C kernels, and what happens where there are none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from heedful.kernels.cpu.library import library

needs_kernels = pytest.mark.skipif(
    library() is None, reason="our kernels need Linux, AVX-512 with VNNI and BF16, and a C compiler"
)


PROGRAM = """
import torch
from heedful.kernels.cpu.library import library
from heedful.kernels import packed
weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0))
kinds = [type(packed.product(weight, None, kind)).__name__ for kind in packed.PLAIN]
print(library() is not None, *kinds)
"""


def ask(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


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
