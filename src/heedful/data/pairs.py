"""Parallel texts for sequence-to-sequence training: two parallel files, or two columns of a tsv, csv or jsonl.

    source    the encoder's input, with the tokenizer's special tokens (</s> for T5 and Marian)
    tokens    [start] + target          targets   target + [eos]

B pairs, S source positions, T target positions
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import numpy as np

from heedful.data import tables
from heedful.data.dataset import IGNORED, Draw
from heedful.data.ragged import Ids, RaggedArray, content_digest, lengths_if_padded, pad_ids
from heedful.models.base import Batch
from heedful.text import BPEDropout, Tokenizer


class Pairs:
    """A dataset of source and target ids. Pairs with a side that is empty or too long are skipped (see `notes`)."""

    def __init__(
        self,
        sources: Sequence[Ids],
        targets: Sequence[Ids],
        *,
        start_id: int,
        eos_id: int,
        max_length: int | None = None,
    ) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets: they come in pairs")
        limit = max_length or 2**62
        sizes = [(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        kept = [i for i, (s, t) in enumerate(sizes) if 0 < s <= limit and 0 < t < limit]
        n_empty = sum(0 in size for size in sizes)
        n_long = len(sizes) - len(kept) - n_empty
        self.notes: list[str] = []
        if n_empty:
            self.notes.append(f"{n_empty} of {len(sizes)} pairs have an empty side and are left out")
        if n_long:
            self.notes.append(f"{n_long} of {len(sizes)} pairs are longer than {max_length} tokens and are left out")
        if not kept:
            raise ValueError("no pair of texts is left: " + ("; ".join(self.notes) or "there is none"))
        self.sources = RaggedArray(sources[i] for i in kept)
        self.targets = RaggedArray(targets[i] for i in kept)
        self.start_id, self.eos_id, self.limit = start_id, eos_id, limit
        self.dropouts: tuple[BPEDropout, BPEDropout] | None = None

    @classmethod
    def read(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        *,
        start_id: int,
        target: str = "",
        source: str = "",
        max_length: int | None = None,
    ) -> Pairs:
        """Read and tokenize pairs; `target` is the parallel file, or the target's column or field in `path`."""
        pairs = read_pairs(Path(path), source, target)
        other = tokenizer.target
        if other.eos_id is None:
            raise ValueError(
                "this tokenizer has no token that ends a text, and a translation must end: "
                "train one with a </s>, for example heedful.text.train_unigram"
            )
        return cls(
            tokenizer.encode_batch([s for s, _ in pairs], add_special=True),
            other.encode_batch([t for _, t in pairs]),
            start_id=start_id,
            eos_id=other.eos_id,
            max_length=max_length,
        )

    def with_dropout(self, tokenizer: Tokenizer, rate: float) -> Pairs:
        """The same pairs, whose words are cut anew in each epoch (BPE-dropout)."""
        other = copy.copy(self)
        other.__dict__.pop("fingerprint", None)
        source = BPEDropout(tokenizer, rate)
        other.dropouts = source, source if tokenizer.target is tokenizer else BPEDropout(tokenizer.target, rate)
        return other

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        rate = [] if self.dropouts is None else [self.dropouts[0].rate]
        return content_digest("pairs", self.sources, self.targets, self.start_id, self.eos_id, *rate)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The length of each example in tokens, for batches of similar lengths."""
        return np.maximum(self.sources.lengths, self.targets.lengths + 1)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        sources: list[Ids] = [self.sources[d.index] for d in draws]
        targets: list[Ids] = [self.targets[d.index] for d in draws]
        if self.dropouts is not None:
            cut_source, cut_target = self.dropouts
            chances = [d.random(seed) for d in draws]
            cut = [(cut_source(s, c), cut_target(t, c)) for s, t, c in zip(sources, targets, chances, strict=True)]
            # A pair that would become too long stays as it is.
            fits = [len(s) <= self.limit and len(t) < self.limit for s, t in cut]
            sources = [new[0] if ok else old for old, new, ok in zip(sources, cut, fits, strict=True)]
            targets = [new[1] if ok else old for old, new, ok in zip(targets, cut, fits, strict=True)]
        return pair_batch(sources, targets, self.start_id, self.eos_id)


def pair_batch(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    start_id: int,
    eos_id: int | None,
    length: int | None = None,
) -> Batch:
    """A batch for teacher forcing: decoder inputs are the targets shifted right behind `start_id`.

    Targets end with `eos_id`, if there is one, and are padded to `length`.
    """
    end = [] if eos_id is None else [eos_id]
    outputs = [np.concatenate([np.asarray(t, dtype=np.int64), end]) for t in targets]
    inputs = [np.concatenate([[start_id], t[:-1]]) for t in outputs]
    return Batch(
        tokens=pad_ids(inputs, 0, length),
        lengths=lengths_if_padded(inputs, length),
        source=pad_ids(sources, 0),
        source_lengths=lengths_if_padded(sources),
        targets=pad_ids(outputs, IGNORED, length),
    )


def read_pairs(path: Path, source: str = "", target: str = "") -> list[tuple[str, str]]:
    """(source, target) texts of two parallel files, or of two columns of one."""
    if target and _is_file(path, target):
        return _parallel(path, path.parent / target if not Path(target).is_file() else Path(target))
    if tables.file_kind(path) not in tables.TABLES and not tables.is_tabbed(path):
        missing = f"there is no file {target}, and " if target else ""
        raise ValueError(
            f"{missing}{path} is no table: name the file with the other language's lines (data.target), "
            "or give a .tsv, .csv or .jsonl with both"
        )
    columns = _columns(path, source, target)
    named = isinstance(columns[0], str)
    found = []
    for row in tables.read_rows(path, named=named):
        texts = tuple(row.get(path, column) for column in columns)
        for column, text in zip(columns, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"{path}, line {row.number}: {column} is {str(text)[:50]!r}, not a text")
        found.append((texts[0], texts[1]))
    return found


def _is_file(path: Path, target: str) -> bool:
    """Whether `target` is a file, perhaps in the folder of `path`, rather than a column of `path`."""
    return Path(target).is_file() or (path.parent / target).is_file()


def _parallel(first: Path, second: Path) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    counts = [0, 0]
    for a, b in zip_longest(tables.numbered_lines(first), tables.numbered_lines(second)):
        counts = [counts[0] + (a is not None), counts[1] + (b is not None)]
        if a is not None and b is not None:
            pairs.append((a[1].strip(), b[1].strip()))
    if counts[0] != counts[1]:
        raise ValueError(
            f"{first} has {counts[0]} lines and {second} has {counts[1]}: line by line they must be translations"
        )
    return pairs


def _columns(path: Path, source: str, target: str) -> tuple[str, str] | tuple[int, int]:
    """Both columns, by name if any is named or the first row has names; else the first two."""
    if source and target:
        return source, target
    names = tables.column_names(path)
    if names is None and not (source or target):
        return 0, 1
    usual = tables.find_pair(names or [])
    if usual is not None and not (source or target):
        return usual
    others = [name for name in names or [] if name not in (source, target)]
    if len(others) != (1 if source or target else 2):
        raise ValueError(
            f"{path} has the columns {', '.join(names or [])}: say which is the source (data.text) and which the "
            "target (data.target)"
        )
    return source or others[0], target or others[-1]
