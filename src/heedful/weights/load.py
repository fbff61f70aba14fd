"""Filling a model from named tensors: peak memory is the model plus one tensor.

A `Source` knows names, shapes and tensors; a safetensors folder, a GGUF file and a dictionary are sources. Everything
is checked by name and shape before the first tensor is read: what is missing, extra or misshapen is an error that
lists it.

Every parameter gets memory of its own, contiguous and aligned as torch aligns it. Keeping parameters in the mapped
file would load faster, but where they lie there depends on the length of the header, and matrix products give other
bits (and up to 30 % less speed) for other alignments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from heedful.models.base import Model
from heedful.models.mapping import Copy, Entry, WeightMap

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_THREADS = 16


class Source(Protocol):
    """Named tensors that are read one by one, maybe from several threads.

    `fresh` says that `get` gives new memory which may be kept; otherwise it is copied, and `release` is told.
    """

    @property
    def fresh(self) -> bool: ...
    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def get(self, name: str) -> Tensor: ...
    def release(self, name: str) -> None: ...


class DictSource:
    """Tensors already in memory."""

    fresh = False

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def release(self, name: str) -> None:
        pass


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

    def put(entry: Entry, tensors: list[Tensor]) -> None:
        for name, tensor in zip(entry.ours, tensors, strict=True):
            parameter = nn.Parameter(tensor, requires_grad=parameters[name].requires_grad)
            for module, attribute in owners[name]:
                setattr(module, attribute, parameter)

    # torch copies with all its threads what only has to be copied; what is turned around it does with one, so
    # several entries are done at a time.
    plain = [e for e in entries if place.is_plain(e)]
    others = [e for e in entries if not place.is_plain(e)]
    for entry in plain:
        put(entry, place(entry))
    with ThreadPoolExecutor(place.n_threads(entries, others)) as threads:
        for entry, tensors in zip(others, threads.map(place, others), strict=True):
            put(entry, tensors)
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
    """Reads one entry's tensors and makes them ours."""

    source: Source
    found: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    device: torch.device
    kind: torch.dtype

    def is_same(self, entry: Entry) -> bool:
        """Nothing changes on the way from the file to the parameter."""
        same = all(self.source.dtype(self.found[t]) == self.kind for t in entry.theirs)
        return same and isinstance(entry.op, Copy) and self.device.type == "cpu"

    def is_plain(self, entry: Entry) -> bool:
        return self.is_same(entry) and not self.source.fresh

    def n_threads(self, entries: list[Entry], others: list[Entry]) -> int:
        """As many as can hold a tensor each in the memory that the largest takes."""
        busy = max((self._n_bytes(e) for e in others if not self.is_same(e)), default=0)
        room = max(map(self._n_bytes, entries), default=0) // busy if busy else MOST_THREADS
        return max(1, min(MOST_THREADS, torch.get_num_threads(), room))

    def _n_bytes(self, entry: Entry) -> int:
        names = [self.found[t] for t in entry.theirs]
        return sum(math.prod(self.source.shape(n)) * self.source.dtype(n).itemsize for n in names)

    def __call__(self, entry: Entry) -> list[Tensor]:
        names = [self.found[t] for t in entry.theirs]
        ours = entry.op.load([self.source.get(n) for n in names], [self.shapes[n] for n in entry.ours])
        if not (self.source.fresh and self.is_same(entry)):
            ours = [torch.empty(x.shape, dtype=self.kind, device=self.device).copy_(x) for x in ours]
        for name in names:
            self.source.release(name)
        return ours


def match(
    entries: list[Entry], weights: WeightMap, source: Source, shapes: Mapping[str, torch.Size]
) -> dict[str, str]:
    """The source's name of each tensor of the map; ValueError with the whole list where they do not agree."""
    given_names = {n for n in source.names() if not weights.is_ignored(n)}
    names = {weights.current(n): n for n in given_names}
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
    for name in sorted(given_names - set(found.values())):
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
