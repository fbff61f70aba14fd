"""The C kernels of every target, compiled with its flags, against scalar references in C (c/).

Those of x86-64 run here, as far as the processor can; those of aarch64 under an emulator, where a cross compiler and
qemu-user are installed (Debian: gcc-aarch64-linux-gnu, qemu-user).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from heedful.kernels.cpu.compile import SOURCES, compiler_platform, compiler_version, find_compiler
from heedful.kernels.cpu.library import cached_library, openmp_libraries
from heedful.kernels.cpu.targets import TARGETS, Target, supported_targets
from heedful.paths import cache_folder

CHECKS = Path(__file__).parent / "c"
CROSS = "aarch64-linux-gnu-gcc"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of the emulated system, where Debian has them
# The least processor of a target: max has everything, neoverse-n1 dot products but neither i8mm nor BF16.
PROCESSORS = {"neon": ["neoverse-n1", "cortex-a76"], "neon-i8mm": ["max"]}


def tools(target: Target) -> tuple[list[str], list[str]]:
    """The compiler, and the words before the command that run it; skips where one is missing."""
    native = find_compiler()
    if native is not None and compiler_platform(native)[0] == target.architecture:
        if target not in supported_targets():
            pytest.skip(f"this processor has no {target.instructions}")
        return native, []
    cross, emulator = shutil.which(CROSS), shutil.which("qemu-aarch64")
    if target.architecture != "aarch64" or cross is None or emulator is None:
        pytest.skip(f"no compiler for {target.architecture}, or no emulator")
    known = subprocess.run([emulator, "-cpu", "help"], capture_output=True, text=True).stdout.split()
    processor = next(name for name in PROCESSORS[target.name] if name in known)
    return [cross], [emulator, "-cpu", processor, "-L", LIBRARIES]


@pytest.mark.skipif(platform.system() not in ("Linux", "Darwin"), reason="linked as there")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_kernels_of_a_target_compute_what_the_references_do(target, tmp_path):
    compiler, emulator = tools(target)
    system = compiler_platform(compiler)[1]
    library = shutil.copy(
        cached_library(compiler, compiler_version(compiler), target, system, cache_folder()), tmp_path / "kernels.so"
    )
    sources = sorted(map(str, CHECKS.glob("*.c")))
    command = [*compiler, "-O2", "-Wall", "-std=gnu11", "-I", str(SOURCES), *sources, str(library), "-lm"]
    if system == "darwin":
        (openmp,) = openmp_libraries()
        command += [str(openmp), f"-Wl,-rpath,{openmp.parent}"]
    else:
        command += ["-Wl,--no-as-needed", "-lgomp"]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}", "-o", str(tmp_path / "check")], check=True)
    waiting = os.environ | {"OMP_WAIT_POLICY": "passive"}  # two threads that spin on one core take minutes
    done = subprocess.run([*emulator, str(tmp_path / "check"), "2"], capture_output=True, text=True, env=waiting)
    wrong = [line for line in done.stdout.splitlines() if not line.startswith("ok")]
    assert wrong[:-1] == [] and wrong[-1:] and "0 wrong" in wrong[-1] and done.returncode == 0, done
