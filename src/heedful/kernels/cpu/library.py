"""The C kernels (csrc/) as one shared library: chosen for this processor, checked and loaded.

A wheel has a library for each target of its platform (targets.py), of which the best that this processor can run is
loaded. Where there is none, as in a clone, or it does not fit, the best target is compiled and cached; where that is
not possible either, `library()` is None and PyTorch's operators are used. `status()` tells which and why.
docs/kernels.md lists the environment variables.

A compiled file is named by a hash of its inputs: sources, flags, compiler and its version. It ends with the SHA-256 of
the rest: a truncated or changed file is not loaded but compiled again.

The kernels share PyTorch's threads: both use the OpenMP runtime that ships with PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.kernels.cpu.compile import (
    FLAGS,
    SOURCES,
    CompileError,
    compile_library,
    compiler_version,
    find_compiler,
    platform_flags,
)  # fmt: skip
from heedful.kernels.cpu.structs import DOUBLE, FLOAT, INT, INT64, POINTER, check_layouts
from heedful.kernels.cpu.targets import TARGETS, Target, supported_targets
from heedful.paths import cache_folder

PREBUILT = Path(__file__).parent / "prebuilt"
SUFFIX = ".dll" if os.name == "nt" else ".so"
DIGEST = hashlib.sha256().digest_size
_logger = logging.getLogger("heedful.kernels")

_ROWS: tuple[Any, ...] = (POINTER, POINTER, INT64, INT64, FLOAT)
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {  # arguments and result of every exported function
    "packed_linear": ((POINTER, POINTER, INT64, POINTER, INT), INT),
    "single_query_attention": ((*[POINTER] * 7, *[INT64] * 5, POINTER, FLOAT, INT), None),
    "decode": ((POINTER, INT64, POINTER, POINTER, POINTER, INT), INT),
    "row_argmax": ((POINTER, INT64, INT64, POINTER, POINTER, INT), None),
    "top_p_cutoff": ((*_ROWS, DOUBLE, POINTER, POINTER, INT), INT),
    "page_masses": ((*_ROWS, POINTER, POINTER, POINTER, INT), None),
    "block_sizes": ((POINTER, POINTER, POINTER), None),
    "block_forward": ((POINTER,), None),
    "block_backward": ((POINTER,), None),
    "sum_of_squares": ((INT64, POINTER, POINTER, INT), DOUBLE),
    "scale_tensors": ((INT64, POINTER, POINTER, FLOAT, INT), None),
    "adamw_step": ((INT64, *[POINTER] * 7, INT), None),
}


@dataclass(frozen=True)
class Status:
    """Whether the C kernels are used here, and why, or why not."""

    available: bool
    reason: str  # one line
    details: str = ""  # the full message, where a library failed

    def __str__(self) -> str:
        return f"C kernels: {'' if self.available else 'not used: '}{self.reason}"


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, Status]:
    """The library and its status, loaded (and if need be compiled) by the first call, which logs failures."""
    wanted = os.environ.get("HEEDFUL_KERNELS", "")
    if wanted == "0":
        return None, Status(False, "HEEDFUL_KERNELS=0 switches them off")
    targets = supported_targets()
    if wanted not in ("", "1"):
        targets = [target for target in targets if target.name == wanted]
        if not targets:
            return None, _failed(Status(False, _why_not(wanted)))
    if not targets:
        known = dict.fromkeys(target.instructions for target in reversed(TARGETS))
        return None, Status(False, f"they need a processor that has one of {', '.join(known)}")
    _share_openmp()
    prebuilt = _prebuilt(targets)
    return prebuilt if prebuilt is not None else _compiled(targets[0])


def _why_not(wanted: str) -> str:
    """Why the target that HEEDFUL_KERNELS names cannot be used."""
    of_name = {target.name: target for target in TARGETS}
    if wanted in of_name:
        return f"HEEDFUL_KERNELS={wanted}: this processor has no {of_name[wanted].instructions}"
    return f"HEEDFUL_KERNELS={wanted}: there are 0 (off), {', '.join(of_name)}"


def _prebuilt(targets: list[Target]) -> tuple[ctypes.CDLL, Status] | None:
    """The best library of those that came with the package, or None if there is none or it does not fit."""
    for target in targets:
        path = PREBUILT / f"{target.name}{SUFFIX}"
        if path.exists():
            try:
                return _open(path), Status(True, f"{target.instructions}, prebuilt")
            except (OSError, ValueError, AttributeError) as error:
                _logger.warning("C kernels: %s cannot be used and is compiled anew: %s", path, error)
    return None


def _compiled(target: Target) -> tuple[ctypes.CDLL | None, Status]:
    """The library of a target, compiled on this machine."""
    compiler = find_compiler()
    if compiler is None:
        return None, Status(False, "no C compiler (cc, gcc, clang) was found")
    try:
        version = compiler_version(compiler)
        lib = _load(compiler, version, target)
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError, CompileError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        summary = next((line for line in lines if "error" in line.lower()), lines[0])
        return None, _failed(Status(False, f"{shlex.join(compiler)}: {summary}", str(error)))
    return lib, Status(True, f"{target.instructions}, compiled by {version}")


def _failed(status: Status) -> Status:
    """Log why there are no kernels."""
    _logger.warning("%s (PyTorch's operators are used instead)", status)
    return status


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


def openmp_libraries() -> list[Path]:
    """The OpenMP runtimes in PyTorch's folders: libgomp on Linux, libomp on macOS, libiomp5md on Windows."""
    package = Path(torch.__file__).parent
    names = [path for folder in (package / "lib", package.parent / "torch.libs") for path in folder.glob("lib*omp*")]
    return [path for path in sorted(names) if path.name.startswith(("libgomp", "libomp", "libiomp5md.dll"))]


def _share_openmp() -> None:
    """Make the symbols of the OpenMP runtime that PyTorch has loaded visible to the kernels; loads no second one."""
    if os.name == "nt":
        return  # found by its name
    for name in (*openmp_libraries(), "libgomp.so.1"):  # the last: the system's, in PyTorch of a distribution
        with suppress(OSError):
            ctypes.CDLL(str(name), mode=os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_GLOBAL)


def _load(compiler: list[str], version: str, target: Target) -> ctypes.CDLL:
    """Load the cached file, compiling first if it is missing or damaged; without a cache folder, a temporary file."""
    system = platform.system().lower()
    with suppress(OSError):
        return _open(cached_library(compiler, version, target, system, cache_folder()))
    # The file is not needed once loaded, though Windows keeps it.
    with tempfile.TemporaryDirectory(prefix="heedful-", ignore_cleanup_errors=True) as folder:
        return _open(cached_library(compiler, version, target, system, Path(folder)))


def cached_library(compiler: list[str], version: str, target: Target, system: str, folder: Path) -> Path:
    """The file of a target in the folder, compiled if it is missing or damaged."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]
    depends_on = [*texts, *compiler, version, *FLAGS, *platform_flags(system), *target.flags]
    digest = hashlib.sha256(chr(0).join(depends_on).encode()).hexdigest()[:16]
    path = folder / f"kernels-{target.name}-{digest}{SUFFIX}"
    if not _intact(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        openmp = next(iter(openmp_libraries()), None)
        _write(path, compile_library(compiler, target.flags, system, openmp))
    return path


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
