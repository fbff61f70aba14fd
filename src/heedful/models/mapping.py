"""The weight map: our tensors' names and the hub's, as a list of rules that serves loading and saving.

    rule("decoder.blocks.{}.attention.query", "model.layers.{}.self_attn.q_proj")

`{}` stands for a number, the same on both sides. A rule names modules, and holds for the weight and the bias of each,
or tensors. Its `Op` converts the hub's tensors ("theirs") to ours and back.
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
    """Converts the tensors of a rule."""

    @property
    def by_rows(self) -> bool:
        """Whether it only reorders, splits and joins rows (the first dimension)."""

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """Our tensors, of these shapes, from theirs."""

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Their tensors from ours."""

    def shapes(self, ours: Shapes) -> Shapes:
        """The shapes of their tensors, given those of ours."""


class Copy:
    """The same tensors on both sides."""

    by_rows = True

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """Unchanged."""
        return theirs

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Unchanged."""
        return ours

    def shapes(self, ours: Shapes) -> Shapes:
        """Unchanged."""
        return ours


class Transpose:
    """Their matrix is (in, out), as in GPT-2's Conv1D."""

    by_rows = False

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """(in, out) -> (out, in); biases unchanged."""
        return [t.t() if t.ndim == 2 else t for t in theirs]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """(out, in) -> (in, out); biases unchanged."""
        return [t.t() if t.ndim == 2 else t for t in ours]

    def shapes(self, ours: Shapes) -> Shapes:
        """Reversed."""
        return [torch.Size(reversed(s)) for s in ours]


class Fuse:
    """Their one tensor is ours concatenated along the output dimension."""

    def __init__(self, *, transposed: bool = False) -> None:
        self.inner: Op = Transpose() if transposed else Copy()
        self.by_rows = not transposed

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """Split."""
        whole = self.inner.load(theirs, shapes)[0]
        return list(whole.split([s[0] for s in shapes]))

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Concatenate."""
        return self.inner.save([torch.cat(ours)])

    def shapes(self, ours: Shapes) -> Shapes:
        """The first dimensions added."""
        return self.inner.shapes([_joined(ours)])


class FuseHeads:
    """Like `Fuse`, but head by head: query, key and value of head 0, then of head 1 (GPT-NeoX). H heads of size D."""

    by_rows = True

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """(H·3·D, ...) -> three of (H·D, ...)."""
        parts = theirs[0].unflatten(0, (self.n_heads, len(shapes), -1))  # (H, 3, D, ...)
        return [parts[:, i].flatten(0, 1) for i in range(len(shapes))]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Three of (H·D, ...) -> (H·3·D, ...)."""
        heads = [t.unflatten(0, (self.n_heads, -1)) for t in ours]
        return [torch.stack(heads, dim=1).flatten(0, 2)]

    def shapes(self, ours: Shapes) -> Shapes:
        """The first dimensions added."""
        return [_joined(ours)]


class Reshape:
    """The same numbers in another shape (a ViT's patch convolution is our linear layer)."""

    by_rows = False

    def __init__(self, *theirs: int) -> None:
        self.theirs = theirs

    def load(self, theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """Reshape to our shapes."""
        return [t.reshape(s) for t, s in zip(theirs, shapes, strict=True)]

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        """Reshape to theirs."""
        return [t.reshape(self.theirs) for t in ours]

    def shapes(self, ours: Shapes) -> Shapes:
        """Their shape."""
        return [torch.empty(s, device="meta").reshape(self.theirs).shape for s in ours]


def _joined(shapes: Shapes) -> torch.Size:
    return torch.Size([sum(s[0] for s in shapes), *shapes[0][1:]])


@dataclass(frozen=True)
class Rule:
    """These modules or tensors of ours are those of theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op
    module: bool  # the names are modules', to be completed by .weight and .bias


def rule(
    ours: str | Sequence[str],
    theirs: str | Sequence[str],
    op: Op | None = None,
    *,
    tensor: bool = False,
) -> Rule:
    """A rule for modules, or with `tensor` for tensors; several names are one tensor on the other side."""
    mine = (ours,) if isinstance(ours, str) else tuple(ours)
    hubs = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    return Rule(mine, hubs, op or Copy(), not tensor)


@dataclass(frozen=True)
class Entry:
    """A rule's tensors in one layer, with the numbers filled in."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op


@dataclass(frozen=True)
class WeightMap:
    """All rules of a model, and how its files may deviate from them."""

    rules: Sequence[Rule]
    prefix: str = ""  # of their names; a file may lack it (a model saved without its head), or add it
    ignored: Sequence[str] = field(default_factory=tuple)  # regular expressions: masks, tables, copies, other heads
    renamed: Mapping[str, str] = field(default_factory=dict)  # regular expression of another name -> the rules' name
    leaves_out: bool = False  # modules of a file which no rule knows, such as other heads, instead of refusing them

    def entries(self, names: Iterable[str]) -> list[Entry]:
        """The rules applied to these parameters' names; every one must be covered exactly once."""
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
        """Whether a file's tensor is of no use for this model."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def left_out(self, names: Iterable[str], matched: Mapping[str, str]) -> list[str]:
        """Those of a file's tensors that may be left out: they belong to modules next to all that the rules name. In
        a module that a rule names, or within the base model, a tensor that is not known would change the results.
        `matched` has the file's name of each of the rules' tensors."""
        if not self.leaves_out:
            return []
        known = {name.removeprefix(self.prefix).partition(".")[0] for name in matched}
        has_prefix = not self.prefix or any(name.startswith(self.prefix) for name in matched.values())
        inside = self.prefix or "\0"
        apart = [n for n in names if has_prefix and "." in n and not n.startswith(inside)]
        return [n for n in apart if n.partition(".")[0] not in known]

    def canonical_name(self, name: str) -> str:
        """The name by which the rules know a file's tensor."""
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
    """The map of a model without a layout on the hub: the file has our names."""
    return WeightMap([rule(n, n, tensor=True) for n in names])


def to_hub(weights: WeightMap, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors, or their gradients, converted and named as on the hub."""
    for entry in weights.entries(tensors):
        yield from zip(entry.theirs, entry.op.save([tensors[n] for n in entry.ours]), strict=True)
