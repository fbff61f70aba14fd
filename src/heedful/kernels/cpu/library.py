"""The C kernels (csrc/) as one shared library: compiled on this machine, cached, checked and loaded.

They need Linux, an x86-64 processor with AVX-512 (with BF16 and VNNI) and a C compiler; elsewhere `library()` is None
and PyTorch's operators are used. `status()` tells which and why. docs/kernels.md lists the environment variables.

The cached file is named by a hash of its inputs: sources, flags, compiler and its version, processor. It ends
with the SHA-256 of the rest: a truncated or changed file is not loaded but compiled again.

The kernels share PyTorch's threads: both use the OpenMP runtime that ships with PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heedful.kernels.cpu.structs import DOUBLE, FLOAT, INT, LONG, POINTER, check_layouts
from heedful.paths import cache_folder

SOURCES = Path(__file__).parent / "csrc"
NEEDS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
INSTRUCTIONS = "AVX-512 with BF16 and VNNI"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11", "-fvisibility=hidden")
TIMEOUT = 300  # seconds for compiling
DIGEST = hashlib.sha256().digest_size

_ROWS: tuple[Any, ...] = (POINTER, POINTER, LONG, LONG, FLOAT)
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {  # arguments and result of every exported function
    "packed_linear": ((POINTER, POINTER, LONG, POINTER, INT), INT),
    "single_query_attention": ((*[POINTER] * 7, *[LONG] * 5, POINTER, FLOAT, INT), None),
    "decode": ((POINTER, LONG, POINTER, POINTER, POINTER, INT), INT),
    "row_argmax": ((POINTER, LONG, LONG, POINTER, POINTER, INT), None),
    "top_p_cutoff": ((*_ROWS, DOUBLE, POINTER, POINTER, INT), INT),
    "page_masses": ((*_ROWS, POINTER, POINTER, POINTER, INT), None),
    "block_sizes": ((POINTER, POINTER, POINTER), None),
    "block_forward": ((POINTER,), None),
    "block_backward": ((POINTER,), None),
    "sum_of_squares": ((LONG, POINTER, POINTER, INT), DOUBLE),
    "scale_tensors": ((LONG, POINTER, POINTER, FLOAT, INT), None),
    "adamw_step": ((LONG, *[POINTER] * 7, INT), None),
}


@dataclass(frozen=True)
class Status:
    """Whether the C kernels are used here, and why, or why not."""

    available: bool
    reason: str  # one line
    details: str = ""  # the compiler's full output, where it failed

    def __str__(self) -> str:
        return f"C kernels: {'' if self.available else 'not used: '}{self.reason}"


class CompileError(Exception):
    """Compiling failed; the message is the compiler's output."""


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, Status]:
    """The library and its status, compiled and loaded by the first call; a failure is logged once, here."""
    if os.environ.get("HEEDFUL_KERNELS") == "0":
        return None, Status(False, "HEEDFUL_KERNELS=0 switches them off")
    if not _processor() >= NEEDS:
        return None, Status(False, f"they need Linux and an x86-64 processor that has {INSTRUCTIONS}")
    compiler = _compiler()
    if compiler is None:
        return None, Status(False, "no C compiler (cc, gcc, clang) was found")
    try:
        version = _version(compiler)
        lib = _load(compiler, version)
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError, CompileError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        summary = next((line for line in lines if "error" in line.lower()), lines[0])
        failed = Status(False, f"{shlex.join(compiler)}: {summary}", str(error))
        logging.getLogger("heedful.kernels").warning("%s (PyTorch's operators are used instead)", failed)
        return None, failed
    return lib, Status(True, f"{INSTRUCTIONS}, compiled by {version}")


def library() -> ctypes.CDLL | None:
    """The library, or None where it is not available. The first call may compile it; see `prepare`."""
    return _loaded()[0]


def prepare() -> Status:
    """Compile and load the kernels now rather than in the first forward pass; later calls return at once."""
    return _loaded()[1]


def status() -> Status:
    """Whether the kernels are used, or why not; loads them if that has not happened yet."""
    return _loaded()[1]


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's data, or NULL."""
    return None if tensor is None else tensor.data_ptr()


def _processor() -> set[str]:
    """The instruction sets of this processor, as /proc/cpuinfo names them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _compiler() -> list[str] | None:
    """The command of a C compiler: CC, which may have arguments, or the first of cc, gcc and clang that is found."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        path = shutil.which(command[0]) if command else None
        if path is not None:
            return [path, *command[1:]]
    return None


def _version(compiler: list[str]) -> str:
    """The compiler's name and version, for example "gcc 12.2.0"."""
    output = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    name = "clang" if "clang" in output else "gcc" if "Free Software Foundation" in output else Path(compiler[0]).name
    numbers = re.findall(r"\d+\.\d+(?:\.\d+)?", output.partition("\n")[0])
    return f"{name} {numbers[-1]}" if numbers else name


def _load(compiler: list[str], version: str) -> ctypes.CDLL:
    """Load the cached file, compiling first if it is missing or damaged; without a cache folder, a temporary file."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]
    depends_on = [*texts, *compiler, version, *FLAGS, *sorted(_processor())]
    name = f"kernels-{hashlib.sha256(chr(0).join(depends_on).encode()).hexdigest()[:16]}.so"
    path = cache_folder() / name
    with suppress(OSError):
        if not _intact(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(path, _compile(compiler))
        return _open(path)
    with tempfile.TemporaryDirectory(prefix="heedful-") as folder:  # the file is not needed once loaded
        path = Path(folder) / name
        _write(path, _compile(compiler))
        return _open(path)


def _open(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    check_layouts(lib)
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result
    return lib


def _intact(path: Path) -> bool:
    """Whether the file exists and ends with the hash of the rest."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _write(path: Path, content: bytes) -> None:
    """Write the content and its hash to a file, atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _compile(compiler: list[str]) -> bytes:
    """Compile all sources in parallel and link them; returns the shared library."""
    with tempfile.TemporaryDirectory(prefix="heedful-") as name:
        folder = Path(name)
        compiling = []
        for source in sorted(SOURCES.glob("*.c")):
            command = [*compiler, *FLAGS, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
            with open(folder / f"{source.stem}.log", "wb") as log:
                compiling.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        try:
            failed = any([process.wait(timeout=TIMEOUT) for process in compiling])
        finally:
            for process in compiling:
                process.kill()
                process.wait()
        if failed:
            logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.log"))]
            raise CompileError("".join(logs).strip() or "it fails and says nothing")
        # Linked without an OpenMP library: its symbols resolve to the one that PyTorch has loaded.
        objects = [str(path) for path in sorted(folder.glob("*.o"))]
        command = [*compiler, "-shared", *objects, "-o", str(folder / "kernels.so")]
        linking = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        if linking.returncode:
            raise CompileError((linking.stderr + linking.stdout).strip() or "it fails to link and says nothing")
        return (folder / "kernels.so").read_bytes()
