"""The map between our tensor names and the hub's, as data: one list of rules gives loading and saving.

    same("decoder.blocks.{}.attention.query", "model.layers.{}.self_attn.q_proj")

`{}` stands for a number, the same on both sides. A rule names tensors, or modules: a module's rule holds for its
weight, and for its bias where it has one. Each rule carries an `Op` that turns their tensors into ours and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Shapes = Sequence[torch.Size]


class Op(Protocol):
    """Turns a rule's tensors from theirs to ours (`load`, given our shapes) and from ours to theirs (`save`).

    `shapes` are those of theirs, given ours.
    """

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]: ...
    def save(self, ours: list[Tensor]) -> list[Tensor]: ...
    def shapes(self, ours: Shapes) -> Shapes: ...


class Copy:
    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        return theirs

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        return ours

    def shapes(self, ours: Shapes) -> Shapes:
        return ours


class Transpose:
    """Their matrix is (in, out): GPT-1's and GPT-2's Conv1D."""

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        return [t.t() if t.ndim == 2 else t for t in theirs]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        return [t.t() if t.ndim == 2 else t for t in ours]

    def shapes(self, ours: Shapes) -> Shapes:
        return [torch.Size(reversed(s)) for s in ours]


class Fuse:
    """Theirs is one tensor where ours are several, one after the other along the output dimension."""

    def __init__(self, *, transposed: bool = False) -> None:
        self.inner: Op = Transpose() if transposed else Copy()

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        whole = self.inner.load(theirs, shapes)[0]
        return list(whole.split([s[0] for s in shapes]))

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        return self.inner.save([torch.cat(ours)])

    def shapes(self, ours: Shapes) -> Shapes:
        return self.inner.shapes([_joined(ours)])


class FuseHeads:
    """Like `Fuse`, but head by head: query, key and value of head 0, then of head 1 (GPT-NeoX)."""

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (self.n_heads, len(shapes), -1))  # (H, 3, D, ...)
        return [parts[:, i].flatten(0, 1) for i in range(len(shapes))]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        heads = [t.unflatten(0, (self.n_heads, -1)) for t in ours]
        return [torch.stack(heads, dim=1).flatten(0, 2)]

    def shapes(self, ours: Shapes) -> Shapes:
        return [_joined(ours)]


class Reshape:
    """The same numbers in another shape (a ViT's patch convolution is our linear layer)."""

    def __init__(self, *theirs: int) -> None:
        self.theirs = theirs

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        return [t.reshape(s) for t, s in zip(theirs, shapes, strict=True)]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        return [t.reshape(self.theirs) for t in ours]

    def shapes(self, ours: Shapes) -> Shapes:
        return [torch.empty(s, device="meta").reshape(self.theirs).shape for s in ours]


def _joined(shapes: Shapes) -> torch.Size:
    return torch.Size([sum(s[0] for s in shapes), *shapes[0][1:]])


@dataclass(frozen=True)
class Rule:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op
    module: bool  # True: names of modules, to be completed by .weight and .bias


def rule(
    ours: str | Sequence[str],
    theirs: str | Sequence[str],
    op: Op | None = None,
    *,
    tensor: bool = False,
) -> Rule:
    """One rule; `tensor` says that the names are tensors' own, not modules'."""
    mine = (ours,) if isinstance(ours, str) else tuple(ours)
    hubs = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    return Rule(mine, hubs, op or Copy(), not tensor)


@dataclass(frozen=True)
class Entry:
    """A rule with its numbers filled in: these tensors of ours are those of theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op


@dataclass(frozen=True)
class WeightMap:
    """All rules of a model. `prefix` may be missing in a file (a checkpoint saved without its head), or be there
    where the rules have none (a bare model's, read from a file with a head); tensors that match `ignored` (regular
    expressions) carry nothing for this model: masks, tables, a second copy of a tied head, the heads it has not.
    `renamed` reads files that use other names (regular expression -> what the rules call it)."""

    rules: Sequence[Rule]
    prefix: str = ""
    ignored: Sequence[str] = field(default_factory=tuple)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def entries(self, names: Iterable[str]) -> list[Entry]:
        """The rules spelled out for a model with these parameters; every parameter is covered exactly once."""
        left = dict.fromkeys(names)
        found: list[Entry] = []
        for one in self.rules:
            for entry in _expand(one, list(left)):
                for name in entry.ours:
                    assert name in left, f"two rules cover {name}, or it does not exist"
                    del left[name]
                found.append(entry)
        assert not left, f"no rule covers {sorted(left)}"
        return found

    def is_ignored(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)

    def current(self, name: str) -> str:
        """A file's name of a tensor as the rules spell it."""
        for pattern, now in self.renamed.items():
            name = re.sub(pattern, now, name)
        return name


def _expand(one: Rule, names: list[str]) -> Iterator[Entry]:
    suffixes = (".weight", ".bias") if one.module else ("",)
    for suffix in suffixes:
        pattern = re.compile(re.escape(one.ours[0] + suffix).replace(r"\{\}", r"(\d+)") + r"\Z")
        for name in names:
            match = pattern.match(name)
            if match:
                numbers = match.groups()
                yield Entry(
                    tuple((o + suffix).format(*numbers) for o in one.ours),
                    tuple((t + suffix).format(*numbers) for t in one.theirs),
                    one.op,
                )


def identity(names: Iterable[str]) -> WeightMap:
    """For families that have no layout on the hub: our names are the file's."""
    return WeightMap([rule(n, n, tensor=True) for n in names])


def to_hub(weights: WeightMap, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors (or their gradients) by the hub's names."""
    for entry in weights.entries(tensors):
        yield from zip(entry.theirs, entry.op.save([tensors[n] for n in entry.ours]), strict=True)
