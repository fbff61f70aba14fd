"""Memory for the CPU kernels: huge pages for weights and KV caches, and malloc settings for training and serving."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

CHUNK = 2**26  # bytes mapped at a time


def keep_memory() -> None:
    """Let malloc keep freed memory for later tensors instead of returning it to the system (glibc only).

    A training step allocates the same tens of megabytes again and again. By default they are returned to the system in
    between and cost page faults when allocated again: a step of a small model on two cores took 1.5 times as long.
    """
    with suppress(OSError, AttributeError, TypeError):  # Windows has no library that is called None
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: smaller blocks come from the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap is not trimmed below this


def share_arenas() -> None:
    """Let all threads share two of malloc's arenas (glibc only): what is freed in one is not used in another."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX


def trim_memory() -> None:
    """Return freed memory to the system (glibc only)."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_file(model: nn.Module) -> None:
    """Copy the parameters that are small parts of a mapped file, of which all else was packed: one of them would keep
    the whole file in memory."""
    parts: dict[int, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is Tensor and tensor.is_cpu:
            parts.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for tensors in parts.values():
        if 2 * sum(tensor.nbytes for tensor in tensors) < tensors[0].untyped_storage().nbytes():
            for tensor in tensors:
                tensor.data = tensor.data.clone()


class HugePages:
    """A memory mapping, on Linux with 2 MB pages where it has them, from which tensors are allocated in sequence."""

    def __init__(self, size: int) -> None:
        # Shared memory, Python's default, gets no huge pages (shmem_enabled is "never" nearly everywhere).
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory, self.used = mmap.mmap(-1, size, **private), 0
        with suppress(OSError, AttributeError):  # macOS has no MADV_HUGEPAGE, Windows no madvise
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def copy(self, tensor: Tensor) -> Tensor | None:
        """A copy of the tensor in this mapping, or None if it does not fit."""
        begin, n = self.used, tensor.nbytes
        if begin + n > len(self.memory):
            return None
        self.used = -(-(begin + n) // 64) * 64
        place = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
        return place.view(tensor.shape).copy_(tensor)


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages; a page takes no memory until it is written to."""
    size = math.prod(shape)
    memory = HugePages(max(1, size) * dtype.itemsize).memory
    return torch.frombuffer(memory, dtype=dtype, count=size).view(*shape)


_current: HugePages | None = None
_lock = threading.Lock()


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy in huge pages, which avoids most TLB misses when weights are read."""
    global _current
    if tensor.nbytes > CHUNK // 2:  # a mapping of its own, freed with the tensor
        found = HugePages(tensor.nbytes).copy(tensor)
    else:
        with _lock:
            found = None if _current is None else _current.copy(tensor)
            if found is None:
                _current = HugePages(CHUNK)
                found = _current.copy(tensor)
    assert found is not None
    return found
