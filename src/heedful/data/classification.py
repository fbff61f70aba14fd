"""Text classification data: one label per text, several binary labels, or numbers (regression).

From csv, tsv and jsonl files or plain lists. Columns and labels that are not given are inferred; of two columns without
names the label is the one with fewer distinct values. Token classification is in tagging.py.

    B examples, T tokens, C labels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from heedful.data import tables
from heedful.data.dataset import Draw
from heedful.data.ragged import RaggedArray, content_digest, lengths_if_padded, pad_ids
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.models.base import Batch
from heedful.text import Tokenizer

LabelKind = Literal["classify", "regress", "multi_label"]
SIGNS = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0, "0.0": 0.0, "1.0": 1.0}
MOST_LABELS = 1000  # more distinct values suggest the wrong column, or regression


class LabelledTexts:
    """Texts, or pairs of texts, with their labels.

    `names` are the labels in the order of their ids; for validation data, those of the training data. Texts are
    truncated to `max_length` tokens (`notes` has the number). `segments` False is for models without segment
    embeddings.
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[Any],
        tokenizer: Tokenizer,
        *,
        seconds: Sequence[str] | None = None,
        kind: LabelKind = "classify",
        names: Sequence[str] | None = None,
        max_length: int | None = None,
        segments: bool = True,
        where: Sequence[str] | None = None,
    ) -> None:
        """`labels` has a name or number per text; for multi_label a sequence of 0 and 1, one per name. `where` is the
        location of each example for error messages."""
        if not len(texts) == len(labels) == len(texts if seconds is None else seconds):
            raise ValueError(f"{len(texts)} texts and {len(labels)} labels: each text needs one")
        if not texts:
            raise ValueError("there is no labelled text")
        self.kind = kind
        self.notes: list[str] = []
        at = where or [f"text {i + 1}" for i in range(len(texts))]
        self.names, self.targets = _targets(kind, labels, names, at)
        template = SpecialTokenTemplate(tokenizer)
        first = tokenizer.encode_batch(texts)
        if seconds is None:
            rows = [template.wrap(ids, max_length) for ids in first]
            limit = math.inf if max_length is None else max_length - len(template.before) - len(template.after)
            n_cut = sum(len(ids) > limit for ids in first)
            self.segments: RaggedArray | None = None
        else:
            second = tokenizer.encode_batch(seconds)
            both = [template.wrap_pair(a, b, max_length) for a, b in zip(first, second, strict=True)]
            rows = [ids for ids, _ in both]
            self.segments = RaggedArray(s for _, s in both) if segments and template.has_segments else None
            limit = math.inf if max_length is None else max_length - template.n_pair
            n_cut = sum(len(a) + len(b) > limit for a, b in zip(first, second, strict=True))
        for place, row in zip(at, rows, strict=True):
            if not len(row):
                raise ValueError(f"{place}: there is no text, and this tokenizer puts nothing around one")
        if n_cut:
            self.notes.append(f"{n_cut} of {len(rows)} texts are longer than {max_length} tokens: their ends are cut")
        self.rows = RaggedArray(rows)

    @classmethod
    def read(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        *,
        text: str | int | None = None,
        second: str | int | None = None,
        label: str | int | Sequence[str | int] | None = None,
        kind: LabelKind = "classify",
        names: Sequence[str] | None = None,
        max_length: int | None = None,
        segments: bool = True,
    ) -> LabelledTexts:
        """Read a table; columns are given by name or index, or inferred (`_choose`)."""
        path = Path(path)
        texts, seconds, labels, at = read_labelled(path, text, second, label, kind)
        if kind == "multi_label" and names is None and isinstance(label, Sequence) and not isinstance(label, str):
            names = [str(column) for column in label]
        return cls(
            texts, labels, tokenizer, seconds=seconds, kind=kind, names=names, max_length=max_length, segments=segments,
            where=at,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest(self.kind, self.rows, self.segments, self.targets.numpy(), self.names)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each example in tokens, for batches of similar lengths."""
        return self.rows.lengths

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        rows = [self.rows[d.index] for d in draws]
        segments = None if self.segments is None else pad_ids([self.segments[d.index] for d in draws], 0)
        targets = self.targets[[d.index for d in draws]]
        return Batch(pad_ids(rows, 0), lengths_if_padded(rows), segments=segments, targets=targets)


def read_labelled(
    path: Path,
    text: str | int | None = None,
    second: str | int | None = None,
    label: str | int | Sequence[str | int] | None = None,
    kind: LabelKind = "classify",
) -> tuple[list[str], list[str] | None, list[Any], list[str]]:
    """Texts, second texts if there are any, labels, and the location of each example for error messages."""
    text, second, label = _choose(path, text, second, label)
    columns = [text, *([] if second is None else [second])]
    if isinstance(label, str | int) == (kind == "multi_label"):
        raise ValueError(
            f"{kind} with the label {label!r}: multi_label has several columns of 0 and 1, every other kind one"
        )
    labels: list[Any] = []
    texts: list[list[str]] = []
    at: list[str] = []
    for row in tables.read_rows(path, named=isinstance(text, str)):
        found = [row.get(path, column) for column in columns]
        for column, value in zip(columns, found, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{path}, line {row.number}: {column} is {str(value)[:50]!r}, not a text")
        texts.append(found)
        if isinstance(label, str | int):
            labels.append(row.get(path, label))
        else:
            labels.append([row.get(path, column) for column in label])
        at.append(f"{path}, line {row.number}")
    return [t[0] for t in texts], None if second is None else [t[1] for t in texts], labels, at


def _choose(
    path: Path,
    text: str | int | None,
    second: str | int | None,
    label: str | int | Sequence[str | int] | None,
) -> tuple[str | int, str | int | None, str | int | Sequence[str | int]]:
    """The columns to read: those given, else by usual names, or of two columns the one with fewer values as label."""
    names = tables.column_names(path)
    if text is not None and label is not None:
        return text, second, label
    if names is not None:
        if text is None:
            text = tables.find_column(names, (*tables.FIRST, *tables.TEXT))
            second = (
                second if second is not None or text not in tables.FIRST else tables.find_column(names, tables.SECOND)
            )
        label = tables.find_column(names, tables.LABEL) if label is None else label
    elif text is None and label is None:
        seen: tuple[set[str], set[str]] = (set(), set())
        for row in tables.read_rows(path, named=False):
            if len(row.cells) != 2:
                raise ValueError(
                    f"{path}, line {row.number}: {len(row.cells)} columns without names; a text and a label are "
                    "expected, or say which columns they are (data.text, data.label)"
                )
            for column in 0, 1:
                seen[column].add(str(row.cells[column]))  # type: ignore[index]
        text, label = (0, 1) if len(seen[1]) <= len(seen[0]) else (1, 0)
    if text is None or label is None:
        has = "without names" if names is None else f"named {', '.join(names)}"
        raise ValueError(f"{path} has columns {has}: say which is the text (data.text) and the label (data.label)")
    return text, second, label


def _targets(
    kind: LabelKind, labels: Sequence[Any], names: Sequence[str] | None, at: Sequence[str]
) -> tuple[tuple[str, ...], Tensor]:
    """The labels' names and the targets: label ids (B,), or floats (B,) or (B, C)."""
    if kind == "regress":
        return (), torch.tensor([_float(x, p) for x, p in zip(labels, at, strict=True)], dtype=torch.float32)
    if kind == "multi_label":
        rows = [[_sign(x, p) for x in row] for row, p in zip(labels, at, strict=True)]
        found = torch.tensor(rows, dtype=torch.float32)
        return tuple(names or [str(i) for i in range(found.shape[1])]), found
    if kind != "classify":
        raise ValueError(f"labels of the kind {kind!r}: classify, regress and multi_label are known")
    values = [str(x).strip() for x in labels]
    if names is None:
        names = sorted(set(values), key=_sort_key)
        if not 2 <= len(names) <= MOST_LABELS:
            raise ValueError(
                f"the labels have {len(names)} different values: 2 to {MOST_LABELS} are expected; is it the right "
                "column? For numbers set the objective to regress"
            )
    return tuple(names), label_ids(values, list(names), at)


def label_ids(labels: Sequence[str], names: list[str], at: Sequence[str]) -> Tensor:
    """The index of each label among `names`, (N,); ValueError with the location of an unknown one."""
    number = {name: i for i, name in enumerate(names)}
    for name, place in zip(labels, at, strict=True):
        if name not in number:
            raise ValueError(f"{place}: the label {name!r} is not one of {', '.join(names[:20])}")
    return torch.tensor([number[name] for name in labels])


def _sort_key(name: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then words alphabetically."""
    whole = name.lstrip("-").isdecimal()
    return not whole, float(name) if whole else 0.0, name


def _float(value: Any, place: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{place}: {str(value)[:50]!r} is no number")
    return number


def _sign(value: Any, place: str) -> float:
    found = SIGNS.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{place}: {str(value)[:50]!r} is not 0 or 1, which says whether a label is true")
    return found
