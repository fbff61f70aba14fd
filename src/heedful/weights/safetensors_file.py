"""Reading safetensors files, each header validated as a whole before any tensor is read.

The format: eight bytes with the length of a JSON header, the header, the tensors' bytes. A header that is longer than
the file, ranges that overlap or leave holes, a shape that does not fit its bytes, a name that comes twice: each is an
error at once. Then the file is mapped into memory.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from heedful.text.parse import parse_json

LONGEST_HEADER = 16 * 2**20  # a hundred thousand tensors; a header from the wild has a few hundred
LARGEST_DIMENSION = 2**48

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file, in bytes from its beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFiles:
    """The tensors of one safetensors file or of a model's shards: a `TensorSource`. Close it, or use it in a `with`.

    `get` returns views of the memory-mapped file, which stay valid after `close`.
    """

    mapped, fresh = True, False

    def __init__(self, paths: Iterable[Path]) -> None:
        self.stored: dict[str, tuple[_Mapped, StoredTensor]] = {}
        self.files: list[_Mapped] = []
        try:
            for path in paths:
                self._add(path)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        file = _Mapped(path)
        self.files.append(file)
        for name, stored in file.header.items():
            if name in self.stored:
                raise ValueError(f"{path.name}: the tensor {name!r} is in another file too")
            self.stored[name] = (file, stored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the maps stay as long as tensors use them."""
        for file in self.files:
            file.file.close()

    def names(self) -> Iterable[str]:
        """The tensors' names."""
        return self.stored

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.stored[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self.stored[name][1].dtype

    def get(self, name: str) -> Tensor:
        """A view of the mapped file."""
        file, stored = self.stored[name]
        return file.get(stored)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory."""
        file, stored = self.stored[name]
        file.release(stored)


class _Mapped:
    """One file: its header, and its bytes."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=0)
        try:
            self.header = read_header(self.file, path.name)
            self.size = os.fstat(self.file.fileno()).st_size
            # A private map: torch wants memory that may be written to, and nothing of it reaches the file.
            self.map = mmap.mmap(self.file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except BaseException:
            self.file.close()
            raise
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def get(self, stored: StoredTensor) -> Tensor:
        if os.fstat(self.file.fileno()).st_size != self.size:
            raise OSError(f"{self.file.name} was changed while it was read; load it again when it is whole")
        part = self.bytes[stored.begin : stored.end]
        if stored.begin % stored.dtype.itemsize:  # no such tensor can be, but its bytes can be moved
            part = part.clone()
        return part.view(stored.dtype).reshape(stored.shape)

    def release(self, stored: StoredTensor) -> None:
        """Drop its pages: without this the whole file would count as used memory in the end."""
        begin = -(-stored.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = stored.end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


_seeking = threading.Lock()


def read_at(file: BinaryIO, memory: memoryview, begin: int) -> None:
    """Fill `memory` with the file's bytes from `begin` on; thread-safe."""
    done = 0
    while done < len(memory):
        if hasattr(os, "preadv"):
            n = os.preadv(file.fileno(), [memory[done:]], begin + done)
        else:
            with _seeking:
                file.seek(begin + done)
                n = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not n:
            raise OSError(f"{file.name} ended while it was read: was it changed? It must not be while it loads")
        done += n


def read_header(file: BinaryIO, name: str) -> dict[str, StoredTensor]:
    """Where each tensor lies; ValueError for whatever is not a whole and consistent safetensors file."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(min(size, 8))
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, LONGEST_HEADER):
        raise ValueError(f"{name} is not a safetensors file{_what_else(first, size, length)}")
    raw = bytearray(length)
    read_at(file, memoryview(raw), 8)
    try:
        header = parse_json(raw.decode("utf-8"), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: the header is not valid JSON ({str(error)[:200]})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{name}: the header is not a JSON object")
    _check_metadata(header.pop("__metadata__", {}), name)
    begin = 8 + length
    found = {tensor: _stored(entry, begin, f"{name}: {tensor[:200]!r}") for tensor, entry in header.items()}
    _check_ranges(found, begin, size, name)
    return found


def _what_else(first: bytes, size: int, length: int) -> str:
    """What the file seems to be instead."""
    if first.startswith((b"\x80", b"PK\x03\x04")):
        return ": it looks like a pickle checkpoint, which can run code when opened and is never opened here"
    if first.startswith(b"version "):
        return ": it is Git's note of where the file is; fetch the file itself with `git lfs pull`"
    if first.startswith(b"GGUF"):
        return ": it is a GGUF file; call it .gguf"
    if len(first) < 8:
        return f": it has {size} bytes"
    if length > LONGEST_HEADER:
        return f": its header claims {length} bytes, and more than {LONGEST_HEADER} are not read"
    return f", or it is cut off: its header claims {length} bytes in a file of {size}"


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _check_metadata(metadata: object, name: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{name}: the header's __metadata__ is not a table of texts")


def _stored(entry: object, base: int, where: str) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} has the type {str(dtype)[:50]!r}; known are {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(shape) > 8 or any(n > LARGEST_DIMENSION for n in shape):
        raise ValueError(f"{where} has no possible shape: {str(shape)[:200]}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} has no possible data_offsets: {str(offsets)[:200]}")
    n_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != n_bytes:
        raise ValueError(f"{where} is {dtype} {shape}, that is {n_bytes} bytes, and has {offsets[1] - offsets[0]}")
    return StoredTensor(DTYPES[dtype], tuple(shape), base + offsets[0], base + offsets[1])


def _are_counts(values: object) -> bool:
    return isinstance(values, Sequence) and all(type(v) is int and v >= 0 for v in values)


def _check_ranges(found: Mapping[str, StoredTensor], begin: int, size: int, name: str) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    reached = begin
    for tensor, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != reached:
            how = "overlaps the tensor before it" if stored.begin < reached else "leaves a hole before it"
            raise ValueError(f"{name}: {tensor[:200]!r} {how}")
        reached = stored.end
    if reached != size:
        raise ValueError(f"{name} has {size} bytes, and its header accounts for {reached}: it is cut off or longer")
