"""Filling a model from named tensors: peak memory is the model plus one tensor.

A `Source` knows names, shapes and tensors; a safetensors folder, a GGUF file and a dictionary are sources. Everything
is checked by name and shape before the first tensor is read: what is missing, extra or misshapen is an error that
lists it.

Tensors that stay as they are in the file are read straight into their place. Those that change (GPT-2's are
transposed, a type is converted) are read into a scratch buffer that the next one uses again, by as many threads as
have room for their buffers in the size of the model's largest tensor.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from heedful.models.base import Model
from heedful.models.mapping import Copy, Entry, WeightMap

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_THREADS = 4

Room = Callable[[int], Tensor]  # so many bytes of memory, as a uint8 tensor


def fresh(n_bytes: int) -> Tensor:
    """Memory of its own."""
    return torch.empty(n_bytes, dtype=torch.uint8)


class Scratch:
    """Memory that is used again and again; `restart` gives all of it back."""

    def __init__(self) -> None:
        self.buffer, self.used = fresh(0), 0

    def restart(self) -> None:
        self.used = 0

    def __call__(self, n_bytes: int) -> Tensor:
        begin = -(-self.used // 64) * 64  # aligned, as new memory would be
        self.used = begin + n_bytes
        if self.used > len(self.buffer):
            # What was handed out of the old buffer keeps it alive as long as it is needed.
            self.buffer, begin, self.used = fresh(n_bytes), 0, n_bytes
        return self.buffer[begin : self.used]


class Source(Protocol):
    """Named tensors that are read one by one, from several threads, into the memory that `room` gives."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def get(self, name: str, room: Room = fresh) -> Tensor: ...


class DictSource:
    """Tensors already in memory; the model shares it where nothing has to change."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def get(self, name: str, room: Room = fresh) -> Tensor:
        return self.tensors[name]


def fill(
    model: Model,
    source: Source,
    *,
    weights: WeightMap | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Give every parameter of `model` (built on the meta device) its tensor from `source`.

    `weights` is the map to the source's names, the model's own unless given. `dtype` None keeps the file's; where a
    file mixes several, all become the one that most of its numbers have.
    """
    weights = weights or model.weight_map()
    parameters = dict(model.named_parameters())
    entries = weights.entries(parameters)
    found = match(entries, weights, source, {n: p.shape for n, p in parameters.items()})
    kind = _kind(source, list(found.values()), dtype)
    place = _Placer(source, found, {n: p.shape for n, p in parameters.items()}, torch.device(device), kind)
    owners = _owners(model)
    with ThreadPoolExecutor(place.n_threads(entries)) as threads:
        for entry, tensors in zip(entries, threads.map(place, entries), strict=True):
            for name, tensor in zip(entry.ours, tensors, strict=True):
                parameter = nn.Parameter(tensor, requires_grad=parameters[name].requires_grad)
                for module, attribute in owners[name]:
                    setattr(module, attribute, parameter)
    model.tie()
    assert not any(b.is_meta for b in model.buffers()), "a buffer got no value: buffers are not in the files"


def _kind(source: Source, names: list[str], wanted: torch.dtype | None) -> torch.dtype:
    """The one type the model's parameters get."""
    counts: dict[torch.dtype, int] = {}
    for name in names:
        kind = source.dtype(name)
        if kind not in FLOATS:
            raise ValueError(
                f"{name} is stored as {str(kind).removeprefix('torch.')}: weights are read as "
                "float32, float16, bfloat16 or float64; use the model's unquantized files, or its GGUF"
            )
        counts[kind] = counts.get(kind, 0) + math.prod(source.shape(name))
    if wanted is not None and wanted not in FLOATS:
        raise ValueError(f"a model cannot be loaded as {wanted}: use float32, float16, bfloat16 or float64")
    return wanted or max(counts, key=lambda k: counts[k])


@dataclass
class _Placer:
    """Reads one entry's tensors and makes them ours; called from several threads."""

    source: Source
    found: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    device: torch.device
    kind: torch.dtype

    def __post_init__(self) -> None:
        self.local = threading.local()

    def direct(self, entry: Entry) -> bool:
        """Nothing changes: what is read is the parameter."""
        same = all(self.source.dtype(self.found[t]) == self.kind for t in entry.theirs)
        return same and isinstance(entry.op, Copy) and self.device.type == "cpu"

    def n_threads(self, entries: list[Entry]) -> int:
        sizes = [sum(self._n_bytes(t) for t in e.theirs) for e in entries]
        buffered = [n for n, e in zip(sizes, entries, strict=True) if not self.direct(e)]
        room = max(sizes, default=0) // max(buffered, default=1) if any(buffered) else MOST_THREADS
        return max(1, min(MOST_THREADS, os.cpu_count() or 1, room))

    def _n_bytes(self, name: str) -> int:
        return math.prod(self.source.shape(self.found[name])) * self.source.dtype(self.found[name]).itemsize

    def __call__(self, entry: Entry) -> list[Tensor]:
        shapes = [self.shapes[n] for n in entry.ours]
        if self.direct(entry):
            return entry.op.load([self.source.get(self.found[t]) for t in entry.theirs], shapes)
        if not hasattr(self.local, "scratch"):
            self.local.scratch = Scratch()
        self.local.scratch.restart()
        theirs = [self.source.get(self.found[t], self.local.scratch) for t in entry.theirs]
        return [self._own(tensor) for tensor in entry.op.load(theirs, shapes)]

    def _own(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the device; the original's memory will be used again."""
        return torch.empty(tensor.shape, dtype=self.kind, device=self.device).copy_(tensor)


def match(
    entries: list[Entry], weights: WeightMap, source: Source, shapes: Mapping[str, torch.Size]
) -> dict[str, str]:
    """The source's name of each tensor of the map; ValueError with the whole list where they do not agree."""
    names = {weights.current(n): n for n in source.names() if not weights.is_ignored(n)}
    found: dict[str, str] = {}
    problems: list[str] = []
    for entry in entries:
        for name in entry.theirs:
            # A file saved without its head lacks the prefix; one saved with a head has it where a bare model does not.
            for given in (name, name.removeprefix(weights.prefix), weights.prefix + name):
                if given in names:
                    found[name] = names[given]
                    break
            else:
                problems.append(f"missing    {name}")
    for name in sorted(set(names.values()) - set(found.values())):
        problems.append(f"extra      {name} {list(source.shape(name))}")
    for entry in entries:
        if all(t in found for t in entry.theirs):
            problems += _misshapen(entry, [source.shape(found[t]) for t in entry.theirs], shapes)
    if problems:
        shown = problems[:40] + ([f"... and {len(problems) - 40} more"] if len(problems) > 40 else [])
        raise ValueError("the weights do not fit the model:\n  " + "\n  ".join(shown))
    return found


def _misshapen(entry: Entry, given: list[tuple[int, ...]], shapes: Mapping[str, torch.Size]) -> list[str]:
    wanted = [shapes[n] for n in entry.ours]
    expected = entry.op.save([torch.empty(s, device="meta") for s in wanted])
    return [
        f"misshapen  {name}: {list(have)}, expected {list(want.shape)}"
        for name, have, want in zip(entry.theirs, given, expected, strict=True)
        if have != tuple(want.shape)
    ]


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter, by its first name, every module attribute that holds it (tied ones are several)."""
    by_id: dict[int, str] = {}
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = by_id.setdefault(id(parameter), name)
        path, _, attribute = name.rpartition(".")
        owners.setdefault(first, []).append((model.get_submodule(path), attribute))
    return owners
