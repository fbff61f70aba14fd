"""Our own kernels for decoding on a CPU (kernels.c): compiled on first use where that is possible, a second or two.

It takes Linux, a processor with AVX-512 (BF16 and VNNI with it) and a C compiler; elsewhere `library` is None and
PyTorch's operators do the work. The compiled file is kept in the user's cache folder under a name that says what it
was made of and for. HEEDFUL_KERNELS=0 switches the kernels off.

`load` does the same for the kernels of training (kernels/cpu/block.py, kernels/cpu/adamw.py).

They multiply nearly as fast as the memory delivers the weights; RESULTS.md has them beside PyTorch's operators.
Their threads are those of PyTorch: both use the same OpenMP, which PyTorch brings along.

    N outputs, K inputs, M rows; B rows, H heads, G heads of keys and values, S keys, D head size
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.paths import cache_folder

SOURCE = Path(__file__).with_name("kernels.c")
NEEDS = {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11")
WIDE = 32  # outputs in a panel, as in kernels.c
CHUNK = 2**26  # bytes of large pages that are asked for at once

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
KINDS = ("float32", "float16", "bfloat16", "int8", "int4")


class Matrix(ctypes.Structure):
    """A packed matrix, as kernels.c has it."""

    _fields_ = (
        ("kind", _LONG), ("n_inputs", _LONG), ("n_outputs", _LONG), ("w", _POINTER), ("scales", _POINTER),
        ("bias", _POINTER),
    )  # fmt: skip


_PRODUCT: tuple[Any, ...] = (_POINTER, _POINTER, _LONG, _POINTER, _INT)
_ATTEND: tuple[Any, ...] = (*[_POINTER] * 7, *[_LONG] * 5, _POINTER, ctypes.c_float, _INT)
_DECODE: tuple[Any, ...] = (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _INT)


_HIGHEST: tuple[Any, ...] = (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT)
_ROWS: tuple[Any, ...] = (_POINTER, _POINTER, _LONG, _LONG, ctypes.c_float)
_NUCLEUS: tuple[Any, ...] = (*_ROWS, ctypes.c_double, _POINTER, _POINTER, _INT)
_MASSES: tuple[Any, ...] = (*_ROWS, _POINTER, _POINTER, _POINTER, _INT)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be had."""
    loaded = load(SOURCE, NEEDS)
    if loaded is not None:
        for kernel, given, returned in (
            (loaded.product, _PRODUCT, _INT),
            (loaded.attend_one, _ATTEND, None),
            (loaded.decode, _DECODE, _INT),
            (loaded.highest, _HIGHEST, None),
            (loaded.nucleus, _NUCLEUS, _INT),
            (loaded.masses, _MASSES, None),
        ):
            kernel.argtypes, kernel.restype = given, returned
    return loaded


def load(source: Path, needs: set[str]) -> ctypes.CDLL | None:
    """A file of kernels, compiled if it was not before; None where the processor or a compiler is missing."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if os.environ.get("HEEDFUL_KERNELS") == "0" or compiler is None or not _processor() >= needs:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, source)))
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> set[str]:
    """What this processor can do."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _compiled(compiler: str, source: Path) -> Path:
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob(f"{source.stem}*.h")))]
    made_of = [*texts, compiler, " ".join(FLAGS), " ".join(sorted(_processor()))]
    name = f"{source.stem}-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:16]}.so"
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (cache / name).exists():
            _compile(compiler, source, cache / name)
        return cache / name
    except OSError:  # nowhere to keep it: for this process alone
        place = Path(tempfile.mkdtemp(prefix="heedful-")) / name
        _compile(compiler, source, place)
        return place


def _compile(compiler: str, source: Path, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        # Linked without OpenMP's library: the one that PyTorch has loaded is found when ours is.
        for command in (
            [*FLAGS, "-c", str(source), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run([compiler, *command], check=True, capture_output=True, timeout=120)
        os.replace(linked, place)


def keep_memory() -> None:
    """Let this process keep the memory that tensors give back, for those that come next (glibc; elsewhere nothing).

    A step of training asks for the same tens of megabytes again and again. As it is, the C library returns them to the
    system in between, and gets them back page by page, zeroed: a small model on two cores took half as long again.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: smaller than this is not mapped on its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nor is so much returned


class _Chunk:
    """Memory in pages of 2 MB where the system has them, of which parts are given away one after the other."""

    def __init__(self, size: int) -> None:
        # Shared memory, Python's default, gets no large pages (shmem_enabled is "never" nearly everywhere).
        own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory, self.used = mmap.mmap(-1, size, **own), 0
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def take(self, tensor: Tensor) -> Tensor | None:
        """A copy of the tensor in here, or None if there is no room."""
        begin, n = self.used, tensor.nbytes
        if begin + n > len(self.memory):
            return None
        self.used = -(-(begin + n) // 64) * 64
        place = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
        return place.view(tensor.shape).copy_(tensor)


def spacious(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in large pages, each of which costs nothing until something is written to it."""
    size = math.prod(shape)
    memory = _Chunk(max(1, size) * dtype.itemsize).memory
    return torch.frombuffer(memory, dtype=dtype, count=size).view(*shape)


_chunk: _Chunk | None = None
_settling = threading.Lock()


def settled(tensor: Tensor) -> Tensor:
    """The same in large pages, where the processor finds it sooner (weights are read from one end to the other)."""
    global _chunk
    if tensor.nbytes > CHUNK // 2:  # a chunk of its own, which goes when the tensor goes
        found = _Chunk(tensor.nbytes).take(tensor)
    else:
        with _settling:
            found = None if _chunk is None else _chunk.take(tensor)
            if found is None:
                _chunk = _Chunk(CHUNK)
                found = _chunk.take(tensor)
    assert found is not None
    return found


# --- products --------------------------------------------------------------------------------------------------------


def panels(weight: Tensor, size: int) -> Tensor:
    """(N, K) -> (N/32, K/size, 32, size): outputs by 32, of each `size` inputs side by side; the rest is 0. A view."""
    n_outputs, n_inputs = weight.shape
    if n_inputs % size or n_outputs % WIDE:
        weight = F.pad(weight, (0, -n_inputs % size, 0, -n_outputs % WIDE))
    return weight.reshape(-1, WIDE, weight.shape[1] // size, size).transpose(1, 2)


def half_panels(steps: Tensor) -> Tensor:
    """0 to 15 (N, K) -> (N/32, K/4, 16, 4) bytes: each has that of an output and of the 16th after it."""
    whole = panels(steps, 4)
    return whole[:, :, :16] | whole[:, :, 16:] << 4


def matrix(
    kind: str, weight: Tensor, n_inputs: int, n_outputs: int, bias: Tensor | None, scales: Tensor | None
) -> Matrix:
    """What `product` multiplies by; the tensors must outlive it."""
    return Matrix(KINDS.index(kind), n_inputs, n_outputs, weight.data_ptr(), pointer(scales), pointer(bias))


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def product(by: Matrix, x: Tensor) -> Tensor:
    """x (..., K) in float32 times a packed matrix, (..., N)."""
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], by.n_outputs)
    lib = library()
    assert lib is not None and x.shape[-1] == by.n_inputs and x.dtype == torch.float32
    lib.product(ctypes.byref(by), x.data_ptr(), x.numel() // by.n_inputs, y.data_ptr(), torch.get_num_threads())
    return y


# --- attention -------------------------------------------------------------------------------------------------------


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend_one` can be used: one query per row, in float32 on a CPU, without gradients."""
    return (
        q.shape[2] == 1
        and q.dtype == k.dtype == v.dtype == torch.float32
        and q.shape[3] % 16 == 0
        and v.shape[3] == q.shape[3]
        and not torch.is_grad_enabled()
        and q.device.type == "cpu"
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and library() is not None
    )


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float | None
) -> Tensor:
    """What `attend` does for one query per row: q (B, H, 1, D), mask (B or 1, 1, 1, S), bias (B or 1, H or 1, 1, S)."""
    (n_rows, n_heads, _, size), (n_groups, n_keys) = q.shape, k.shape[1:3]
    mask, bias = (None if t is None else t.contiguous() for t in (mask, bias))
    out, scores = q.new_empty(n_rows, 1, n_heads, size), q.new_empty(n_rows, n_heads, n_keys)
    strides = [*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]]
    strides.append(0 if mask is None or len(mask) == 1 else mask.stride(0))
    strides += [0, 0] if bias is None else [bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1)]
    lib = library()
    assert lib is not None
    lib.attend_one(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer(mask), pointer(bias), out.data_ptr(), scores.data_ptr(),
        n_rows, n_heads, n_groups, n_keys, size, (ctypes.c_long * 11)(*strides),
        size**-0.5 if scale is None else scale, torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(1, 2)  # (B, H, 1, D)


# --- choosing --------------------------------------------------------------------------------------------------------


def chooses(logits: Tensor) -> bool:
    """Whether `highest` and `masses` can read them."""
    return (
        logits.ndim == 2
        and logits.dtype == torch.float32
        and logits.device.type == "cpu"
        and logits.is_contiguous()
        and logits.numel() > 0
        and library() is not None
    )


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of each row (B, V) and the first place that has it, each (B,); NaN where there is one."""
    n_rows, n_tokens = logits.shape
    values, places = logits.new_empty(n_rows), torch.empty(n_rows, dtype=torch.long)
    lib = library()
    assert lib is not None
    at = logits.data_ptr(), n_rows, n_tokens, values.data_ptr(), places.data_ptr()
    lib.highest(*at, torch.get_num_threads())
    return values, places


def nucleus(logits: Tensor, highest: Tensor, heat: float, share: float) -> tuple[Tensor, Tensor]:
    """The fewest logits of each row (B, V), greatest first, with this share of the mass of e^((logit - highest) heat):
    those above a cut (B,), and of those that equal it the ones up to a last place (B,)."""
    n_rows, n_tokens = logits.shape
    cuts, lasts = logits.new_empty(n_rows), torch.empty(n_rows, dtype=torch.long)
    lib = library()
    assert lib is not None
    at = logits.data_ptr(), highest.data_ptr(), n_rows, n_tokens, heat, share
    if not lib.nucleus(*at, cuts.data_ptr(), lasts.data_ptr(), torch.get_num_threads()):
        raise MemoryError("no memory to sort logits")
    return cuts, lasts


def masses(logits: Tensor, highest: Tensor, heat: float, of: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """What each page of 256 logits of a row (B, V) weighs, or the `nucleus` of it: (B, pages)."""
    n_rows, n_tokens = logits.shape
    found = logits.new_empty(n_rows, -(-n_tokens // 256))
    cuts, lasts = (None, None) if of is None else (of[0].data_ptr(), of[1].data_ptr())
    lib = library()
    assert lib is not None
    at = logits.data_ptr(), highest.data_ptr(), n_rows, n_tokens, heat
    lib.masses(*at, cuts, lasts, found.data_ptr(), torch.get_num_threads())
    return found
