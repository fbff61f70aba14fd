"""The C kernels as one shared library: compiled at first use where that is possible, a few seconds, and then cached.

They need Linux, an x86-64 processor with AVX-512 (with BF16 and VNNI) and a C compiler; elsewhere `library` is None and
PyTorch's operators do the work. HEEDFUL_KERNELS=0 switches them off.

Their threads are PyTorch's: both use the OpenMP runtime that PyTorch brings along.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from heedful.paths import cache_folder

FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "training.c", "lists.c")
NEEDS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11")

POINTER, LONG, INT, FLOAT, DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_double
_ROWS: tuple[Any, ...] = (POINTER, POINTER, LONG, LONG, FLOAT)
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {  # arguments and result of every exported function
    "product": ((POINTER, POINTER, LONG, POINTER, INT), INT),
    "attend_one": ((*[POINTER] * 7, *[LONG] * 5, POINTER, FLOAT, INT), None),
    "decode": ((POINTER, LONG, POINTER, POINTER, POINTER, INT), INT),
    "highest": ((POINTER, LONG, LONG, POINTER, POINTER, INT), None),
    "nucleus": ((*_ROWS, DOUBLE, POINTER, POINTER, INT), INT),
    "masses": ((*_ROWS, POINTER, POINTER, POINTER, INT), None),
    "block_layout": ((POINTER, POINTER, POINTER), None),
    "block_forward": ((POINTER,), None),
    "block_backward": ((POINTER,), None),
    "block_bytes": ((), LONG),
    "squares": ((LONG, POINTER, POINTER, INT), DOUBLE),
    "scale": ((LONG, POINTER, POINTER, FLOAT, INT), None),
    "adamw": ((LONG, *[POINTER] * 7, INT), None),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled if they were not before; None where the processor or a compiler is missing."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if os.environ.get("HEEDFUL_KERNELS") == "0" or compiler is None or not _processor() >= NEEDS:
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's data, or NULL."""
    return None if tensor is None else tensor.data_ptr()


def _processor() -> set[str]:
    """The instruction sets of this processor, as /proc/cpuinfo names them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _compiled(compiler: str) -> Path:
    """The shared library in the cache folder, under a name that is a hash of all that it depends on."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.[ch]"))]
    depends_on = [*texts, compiler, " ".join(FLAGS), " ".join(sorted(_processor()))]
    name = f"kernels-{hashlib.sha256(chr(0).join(depends_on).encode()).hexdigest()[:16]}.so"
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (cache / name).exists():
            _compile(compiler, cache / name)
        return cache / name
    except OSError:  # the cache cannot be written: for this process alone
        path = Path(tempfile.mkdtemp(prefix="heedful-")) / name
        _compile(compiler, path)
        return path


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [str(Path(folder) / Path(source).with_suffix(".o")) for source in SOURCES]
        compiling = [
            subprocess.Popen(
                [compiler, *FLAGS, "-c", str(FOLDER / source), "-o", compiled],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ) for source, compiled in zip(SOURCES, objects, strict=True)
        ]  # fmt: skip
        if any([process.wait(timeout=120) for process in compiling]):
            raise subprocess.SubprocessError("the kernels do not compile")
        linked = Path(folder) / "kernels.so"
        # Linked without the OpenMP library: the one that PyTorch has loaded is found when ours is.
        command = [compiler, "-shared", *objects, "-o", str(linked)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        os.replace(linked, path)
