"""Loading named tensors into a model: peak memory is the model plus one tensor.

A `TensorSource` has names, shapes and tensors: a safetensors folder, a GGUF file, a dictionary. Names and shapes are
all checked before the first tensor is read: what is missing, extra or misshapen is an error that lists it.

On the CPU and in the type they are stored in, parameters stay in the memory-mapped file: pages are read when first
used, and shared by all processes that load it. They may be written to (copy on write); the file does not change. It may
be replaced by another, but not overwritten, while the model is in use. A tensor in a file is not aligned as torch would
align it, and a transposed one (GPT-2's) stays a view: products give the same numbers but for their last bits, some more
slowly. `clone_parameters` gives every parameter memory of its own, for training; packing (kernels/pack.py) does too.

Of a parameter that is divided over processes (a DTensor) each copies its own shard, and no other part of the file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from heedful.kernels.quantize import QuantizedWeight, keep_integers
from heedful.models.base import Model
from heedful.models.config import Config
from heedful.models.mapping import Entry, WeightMap
from heedful.weights.integers import IntegerSource, convert_integers

M = TypeVar("M", bound=nn.Module)

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_THREADS = 16


class LeftOutWarning(UserWarning):
    """Tensors of a file were not loaded, since the model has no part for them."""


class TensorSource(Protocol):
    """Named tensors that are read one by one, maybe from several threads.

    A tensor from `get` becomes a parameter as it is if it is `mapped` or `fresh`; otherwise it is copied and then
    released.
    """

    @property
    def mapped(self) -> bool:
        """Whether `get` returns views of a memory-mapped file."""
        ...

    @property
    def fresh(self) -> bool:
        """Whether `get` returns newly allocated memory."""
        ...

    def names(self) -> Iterable[str]:
        """The tensors' names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        ...

    def get(self, name: str) -> Tensor:
        """Read a tensor."""
        ...

    def release(self, name: str) -> None:
        """A tensor was copied: its memory may be freed."""
        ...


class DictSource:
    """Tensors already in memory."""

    mapped = fresh = False

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        """The tensors' names."""
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self.tensors[name].dtype

    def get(self, name: str) -> Tensor:
        """The tensor itself."""
        return self.tensors[name]

    def release(self, name: str) -> None:
        """Nothing to free: the caller keeps the tensors."""


def load_tensors(
    model: Model,
    source: TensorSource,
    *,
    weights: WeightMap | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    integers: bool = False,
) -> None:
    """Load every parameter of `model` (built on the meta device) from `source`; of a DTensor this process's shard.

    `weights` is the map to the source's names, the model's own unless given. `dtype` None keeps the file's; where a
    file mixes several, all become the one that most of its numbers have. With `integers` the parameters keep those of a
    quantized file too, for kernels that take them (`keep_integers`).
    """
    weights = weights or model.weight_map()
    parameters = dict(model.named_parameters())
    entries = weights.entries(parameters)
    found = match_tensors(entries, weights, source, {n: p.shape for n, p in parameters.items()})
    kind = _kind(source, list(found.values()), dtype)
    place = _Placer(source, found, parameters, torch.device(device), kind)
    owners = _owners(model)

    def put(entry: Entry, tensors: list[Tensor]) -> None:
        for name, tensor in zip(entry.ours, tensors, strict=True):
            parameter = nn.Parameter(_joined(tensor, parameters[name]), requires_grad=parameters[name].requires_grad)
            for module, attribute in owners[name]:
                setattr(module, attribute, parameter)
        if integers and isinstance(source, IntegerSource) and entry.op.by_rows:
            _keep_integers(entry, [source.integers(found[name]) for name in entry.theirs], owners)

    others = []
    for entry in entries:
        if source.mapped and place.is_kept(entry):
            put(entry, place(entry))
        else:
            others.append(entry)
    if others:  # torch decodes, and turns a matrix around, with one thread
        with ThreadPoolExecutor(place.n_threads(entries, others)) as threads:
            for entry, tensors in zip(others, threads.map(place, others), strict=True):
                put(entry, tensors)
    model.tie()
    assert not any(b.is_meta for b in model.buffers()), "a buffer got no value: buffers are not in the files"


def _keep_integers(
    entry: Entry, stored: list[QuantizedWeight | None], owners: Mapping[str, list[tuple[nn.Module, str]]]
) -> None:
    """Let the parameters of an entry keep the integers that are stored for it, if the kernels can take them."""
    parameters: list[nn.Parameter] = [getattr(*owners[name][0]) for name in entry.ours]
    shapes = [parameter.shape for parameter in parameters]
    forms = convert_integers(lambda theirs: entry.op.load(theirs, shapes), stored) or ()
    for parameter, form in zip(parameters, forms, strict=False):
        parameter.data = form.dequantize().to(parameter)
        keep_integers(parameter, form.map(partial(Tensor.to, device=parameter.device)))


def clone_parameters(model: M) -> M:
    """Copy every parameter out of the mapped file into contiguous, aligned memory of its own; returns the model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return model


def with_config(model: Model, config: Config) -> tuple[Model, list[str]]:
    """A model of another config with the same weights where names and shapes agree, and the names of its other
    parameters (a new head, say), which are initialized."""
    fresh = type(model).create(config)
    fresh.special, fresh.generation = dict(model.special), dict(model.generation)
    fresh.preprocessor = dict(model.preprocessor)
    old, new = dict(model.named_parameters()), []
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if name in old and old[name].shape == parameter.shape:
                parameter.copy_(old[name])
            else:
                new.append(name)
    return fresh, new


def _kind(source: TensorSource, names: list[str], wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of all parameters: `wanted`, or the one that most stored numbers have."""
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
    """Reads the tensors of one entry of the weight map and converts them to parameters."""

    source: TensorSource
    found: Mapping[str, str]
    parameters: Mapping[str, Tensor]
    device: torch.device
    kind: torch.dtype

    def is_kept(self, entry: Entry) -> bool:
        """Whether the source's tensors become the parameters without a copy."""
        same = all(self.source.dtype(self.found[t]) == self.kind for t in entry.theirs)
        same = same and not any(is_sharded(self.parameters[n]) for n in entry.ours)
        return same and self.device.type == "cpu" and (self.source.mapped or self.source.fresh)

    def n_threads(self, entries: list[Entry], others: list[Entry]) -> int:
        """As many as can hold a tensor each in the memory of the largest one."""
        busy = max((self._n_bytes(e) for e in others if not self.is_kept(e)), default=0)
        room = max(map(self._n_bytes, entries), default=0) // busy if busy else MOST_THREADS
        return max(1, min(MOST_THREADS, torch.get_num_threads(), room))

    def _n_bytes(self, entry: Entry) -> int:
        names = [self.found[t] for t in entry.theirs]
        return sum(math.prod(self.source.shape(n)) * self.source.dtype(n).itemsize for n in names)

    def __call__(self, entry: Entry) -> list[Tensor]:
        names = [self.found[t] for t in entry.theirs]
        ours = entry.op.load([self.source.get(n) for n in names], [self.parameters[n].shape for n in entry.ours])
        if self.is_kept(entry):
            return ours
        ours = [_shard(x, self.parameters[n]) for x, n in zip(ours, entry.ours, strict=True)]
        ours = [torch.empty(x.shape, dtype=self.kind, device=self.device).copy_(x) for x in ours]
        for name in names:
            self.source.release(name)
        return ours


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. (Not isinstance: importing DTensor takes time.)"""
    return hasattr(tensor, "device_mesh")


def _shard(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of the parameter `like`: all of it, unless that is a DTensor."""
    if not is_sharded(like):
        return tensor
    local, mesh = like.to_local().shape, like.device_mesh  # type: ignore[attr-defined]
    for dim, size in enumerate(tensor.shape):
        if local[dim] != size:  # shards have the size of the first, except for the last ones
            begin = mesh.get_local_rank() * -(-size // mesh.size())
            tensor = tensor.narrow(dim, min(begin, size), local[dim])
    return tensor


def _joined(local: Tensor, like: Tensor) -> Tensor:
    """A process's shard as a part of a DTensor, if `like` is one."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mesh, places = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, places, run_check=False, shape=like.shape, stride=like.stride())


def match_tensors(
    entries: list[Entry], weights: WeightMap, source: TensorSource, shapes: Mapping[str, torch.Size]
) -> dict[str, str]:
    """The source's name of each tensor of the weight map; ValueError that lists every disagreement."""
    given_names = {n for n in source.names() if not weights.is_ignored(n)}
    names = {weights.canonical_name(n): n for n in given_names}
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
    extra = sorted(given_names - set(found.values()))
    left_out = weights.left_out(extra, {name: found.get(name, "") for entry in entries for name in entry.theirs})
    for name in [name for name in extra if name not in left_out]:
        problems.append(f"extra      {name} {list(source.shape(name))}")
    for entry in entries:
        for name, want in zip(entry.theirs, entry.op.shapes([shapes[n] for n in entry.ours]), strict=True):
            if name in found and (have := source.shape(found[name])) != want:
                problems.append(f"misshapen  {name}: {list(have)}, expected {list(want)}")
    if problems:
        shown = problems[:40] + ([f"... and {len(problems) - 40} more"] if len(problems) > 40 else [])
        raise ValueError("the weights do not fit the model:\n  " + "\n  ".join(shown))
    if left_out:
        shown = left_out[:10] + ([f"... and {len(left_out) - 10} more"] if len(left_out) > 10 else [])
        warnings.warn(f"left out, as the model has no such part: {', '.join(shown)}", LeftOutWarning, stacklevel=4)
    return found


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter, by its first name, every (module, attribute) that holds it; tied ones have several."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(by_id[id(parameter)], []).append((module, attribute))
    return owners
