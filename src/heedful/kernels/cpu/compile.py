"""Compiling the C sources (csrc/) into a shared library, for this machine or, with a cross compiler, for another.

Standard library alone: `hatch_build.py` runs it before the package is installed. The OpenMP runtime is never linked or
bundled: its symbols resolve to the one that PyTorch has loaded. GCC calls GNU's (libgomp, PyTorch's on Linux), Clang
LLVM's (libomp on macOS, libiomp5md on Windows), so that on Linux the compiler is GCC.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fvisibility=hidden")
TIMEOUT = 300  # seconds


class CompileError(Exception):
    """Compiling failed; the message is the compiler's output."""


def find_compiler() -> list[str] | None:
    """The command of a C compiler: CC, which may have arguments, or the first of cc, gcc and clang that is found."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        path = shutil.which(command[0]) if command else None
        if path is not None:
            return [path, *command[1:]]
    return None


def compiler_version(compiler: list[str]) -> str:
    """The compiler's name and version, for example "gcc 12.2.0"."""
    output = _output([*compiler, "--version"])
    name = "clang" if "clang" in output else "gcc" if "Free Software Foundation" in output else Path(compiler[0]).name
    numbers = re.findall(r"\d+\.\d+(?:\.\d+)?", output.partition("\n")[0])
    return f"{name} {numbers[-1]}" if numbers else name


def compiler_platform(compiler: list[str]) -> tuple[str, str]:
    """The architecture and the system that it compiles for: ("x86_64" or "aarch64", "linux", "darwin" or "windows")."""
    triple = _output([*compiler, "-dumpmachine"]).strip()
    architecture = {"arm64": "aarch64", "amd64": "x86_64"}.get(triple.partition("-")[0], triple.partition("-")[0])
    system = next((name for name in ("darwin", "windows", "linux") if name in triple), "")
    return architecture, "darwin" if "macos" in triple else "windows" if "mingw" in triple else system


def platform_flags(system: str) -> list[str]:
    """The flags of a system, for compiling."""
    if system == "windows":
        return ["-fopenmp"]  # every code is position-independent there, and the flag for it an error
    return ["-fPIC", "-Xclang", "-fopenmp"] if system == "darwin" else ["-fPIC", "-fopenmp"]


def compile_library(compiler: list[str], flags: Sequence[str], system: str, openmp: Path | None = None) -> bytes:
    """Compile all sources in parallel and link them; returns the shared library. On Windows `openmp` is the DLL."""
    with tempfile.TemporaryDirectory(prefix="heedful-") as name:
        folder = Path(name)
        every = [*compiler, *FLAGS, *platform_flags(system), *flags]
        with _processes() as compiling:
            for source in sorted(SOURCES.glob("*.c")):
                command = [*every, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
                with open(folder / f"{source.stem}.log", "wb") as log:
                    compiling.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            failed = any([process.wait(timeout=TIMEOUT) for process in compiling])
        if failed:
            logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.log"))]
            raise CompileError("".join(logs).strip() or "it fails and says nothing")
        objects = [str(path) for path in sorted(folder.glob("*.o"))]
        undefined = {"darwin": ["-undefined", "dynamic_lookup"], "windows": [str(openmp)]}.get(system, [])
        command = [*compiler, "-shared", *objects, *undefined, "-o", str(folder / "kernels.so")]
        linking = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT)
        if linking.returncode:
            raise CompileError((linking.stderr + linking.stdout).strip() or "it fails to link and says nothing")
        return (folder / "kernels.so").read_bytes()


@contextmanager
def _processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes, none of which outlives the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace", timeout=60)
    return done.stdout
