"""Reading GGUF, llama.cpp's file format: metadata, and tensors that may be quantized.

The header is validated before anything is used: every count against the bytes that are left, every tensor against the
file's end and its neighbours. The `gguf` package knows what the quantized blocks mean; its own
reader is not used, because it trusts the counts in the file and takes seconds for a vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import gguf
import numpy as np
import torch
from torch import Tensor

from heedful.kernels.quantize import GROUP, QuantizedWeight
from heedful.weights.safetensors_file import read_at

LARGEST_DESCRIPTION = 256 * 2**20  # metadata and table of tensors; a vocabulary of 256,000 takes about 10 MB
MOST_VALUES = 2**22  # in one list of the metadata
MOST_TENSORS = 2**17
PIECE = 2**18  # weights that are dequantized at a time: a multiple of every block

# The numbers of the format's value types (GGUFv3), as numpy reads them.
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
STRING, LIST = 8, 9

PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
    gguf.GGMLQuantizationType.F64: torch.float64,
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in a file, in bytes from its beginning; quantized unless `kind` is in PLAIN."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """An open GGUF file: metadata as plain values in `fields`, tensors by the file's own names, dequantized to float32
    (a `TensorSource`). Close it, or use it in a `with`."""

    mapped, fresh = False, True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb", buffering=0)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _read(self) -> None:
        size = os.fstat(self.file.fileno()).st_size
        with self.path.open("rb", buffering=2**20) as description:
            self._read_description(_Cursor(description, size, self.path.name), size)

    def _read_description(self, cursor: _Cursor, size: int) -> None:
        if cursor.take(4) != b"GGUF":
            raise ValueError(f"{self.path.name} is not a GGUF file")
        version, n_tensors, n_fields = cursor.number(4), cursor.number(8), cursor.number(8)
        if version not in (2, 3):
            raise ValueError(f"{self.path.name} is GGUF version {version}; 2 and 3 (little-endian) are read")
        if n_tensors > MOST_TENSORS:
            raise cursor.wrong(f"it claims {n_tensors} tensors")
        self.fields: dict[str, Any] = {}
        for _ in range(n_fields):  # a false count ends at the end of the bytes
            key = cursor.text()
            if key in self.fields:
                raise cursor.wrong(f"{key[:100]!r} comes twice")
            self.fields[key] = cursor.value(cursor.number(4))
        self.blocks = self._table(cursor, n_tensors, size)

    def _table(self, cursor: _Cursor, n_tensors: int, size: int) -> dict[str, GgufTensor]:
        rows = []
        for _ in range(n_tensors):
            name, n_dimensions = cursor.text(), cursor.number(4)
            if not 1 <= n_dimensions <= 4:
                raise cursor.wrong(f"{name[:100]!r} has {n_dimensions} dimensions")
            shape = tuple(cursor.number(8) for _ in range(n_dimensions))[::-1]  # they count from the inside
            rows.append((name, shape, cursor.number(4), cursor.number(8)))
        step = self.fields.get("general.alignment", 32)
        if type(step) is not int or not 8 <= step <= 2**20 or step % 8:
            raise cursor.wrong(f"its alignment is {str(step)[:50]}")
        begin = -(-cursor.at // step) * step
        blocks: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in rows:
            if name in blocks:
                raise cursor.wrong(f"the tensor {name[:100]!r} comes twice")
            blocks[name] = _block(cursor, name, shape, kind, begin + offset, size)
        reached = begin
        for name, block in sorted(blocks.items(), key=lambda item: item[1].begin):
            if block.begin < reached:
                raise cursor.wrong(f"{name[:100]!r} overlaps the tensor before it")
            reached = block.end
        return blocks

    def names(self) -> Iterable[str]:
        """The tensors' names."""
        return self.blocks

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.blocks[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return PLAIN.get(self.blocks[name].kind, torch.float32)

    def get(self, name: str) -> Tensor:
        """Read a tensor, dequantized."""
        block = self.blocks[name]
        if block.kind in PLAIN:
            memory = torch.empty(block.end - block.begin, dtype=torch.uint8)
            read_at(self.file, memory.numpy().data, block.begin)
            return memory.view(PLAIN[block.kind]).reshape(block.shape)
        out = torch.empty(block.shape)
        self._dequantize(block, out.numpy().reshape(-1))
        return out

    def integers(self, name: str) -> QuantizedWeight | None:
        """The integers (..., K) of a tensor in Q8_0 or Q4_1, with scales and zero points (..., K/32), for the kernels;
        None for any other."""
        block = self.blocks[name]
        if block.kind not in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
            return None
        memory = torch.empty(block.end - block.begin, dtype=torch.uint8)
        read_at(self.file, memory.numpy().data, block.begin)
        groups = memory.view(*block.shape[:-1], block.shape[-1] // GROUP, -1)  # a scale, a least value (Q4_1), integers
        scale = groups[..., :2].clone().view(torch.float16)[..., 0]
        if block.kind == gguf.GGMLQuantizationType.Q8_0:
            ints = groups[..., 2:].view(torch.int8).flatten(-2)
            return QuantizedWeight(ints, scale) if int(ints.min()) > -128 else None
        least = groups[..., 2:4].clone().view(torch.float16)[..., 0]
        pairs = groups[..., 4:]  # the first half of a group in the low bits
        zero = (least.float() + 8 * scale.float()).half()
        return QuantizedWeight(torch.cat([pairs & 15, pairs >> 4], dim=-1).flatten(-2), scale, zero)

    def release(self, name: str) -> None:
        """Nothing to free: every tensor is read into memory of its own."""

    def _dequantize(self, block: GgufTensor, out: np.ndarray[Any, Any]) -> None:
        """Piece by piece: a piece and what is made of it stay in the processor's cache."""
        for begin in range(0, len(out), PIECE):
            piece = out[begin : begin + PIECE]
            packed = bytearray(_row_bytes(block.kind, len(piece)))
            read_at(self.file, memoryview(packed), block.begin + _row_bytes(block.kind, begin))
            rows = np.frombuffer(packed, np.uint8)[None]
            piece[:] = gguf.quants.dequantize(rows, block.kind)[0]


def _row_bytes(kind: gguf.GGMLQuantizationType, n: int) -> int:
    per_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    return n // per_block * n_bytes


def _block(cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, begin: int, size: int) -> GgufTensor:
    try:
        kind = gguf.GGMLQuantizationType(number)
        per_block, _ = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise cursor.wrong(f"{name[:100]!r} has the unknown type {number}") from None
    if any(not 1 <= n < 2**40 for n in shape) or shape[-1] % per_block:
        raise cursor.wrong(f"{name[:100]!r} has no possible shape for {kind.name}: {list(shape)}")
    end = begin + math.prod(shape[:-1]) * _row_bytes(kind, shape[-1])
    if end > size:
        raise cursor.wrong(f"{name[:100]!r} ends after byte {end} in a file of {size}: it is cut off")
    return GgufTensor(kind, shape, begin, end)


class _Cursor:
    """Takes values off the front of a file, never past its end."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self.file, self.name, self.at = file, name, 0
        self.end = min(size, LARGEST_DESCRIPTION)

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.name} is not a whole GGUF file: {what}")

    def take(self, n: int) -> bytes:
        if n > self.end - self.at:
            raise self.wrong(f"{n} bytes are to follow byte {self.at}, and {self.end - self.at} do")
        self.at += n
        return self.file.read(n)

    def number(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def text(self) -> str:
        try:
            return self.take(self.number(8)).decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"the text before byte {self.at} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == LIST:
            inner, n = self.number(4), self.number(8)
            if n > MOST_VALUES:
                raise self.wrong(f"a list claims {n} values")
            if inner == STRING:
                return [self.text() for _ in range(n)]
            return self._scalars(inner, n).tolist()
        (number,) = self._scalars(kind, 1)
        # A float32 as it was meant: 1e-05, not 9.999999747378752e-06.
        return float(str(number)) if number.dtype == np.float32 else number.item()

    def _scalars(self, kind: int, n: int) -> np.ndarray[Any, Any]:
        if kind not in SCALARS:
            raise self.wrong(f"a value before byte {self.at} has the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(n * dtype.itemsize), dtype)
