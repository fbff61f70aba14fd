"""What a file or folder is, for `heedful train FILE`: text, labelled texts, pairs, conversations, images and others.

A table is recognised by the names of its columns, or else by what its first rows hold: a column of few short values
that repeat is a label, one of long values that differ is a text. Nothing is guessed where two columns could be meant.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from heedful.data import tables
from heedful.data.chats import is_chat_file
from heedful.data.images import ENDINGS, count_images, is_image_data
from heedful.data.preferences import is_preference_file

SAMPLE = 2000  # rows by which a table is recognised
MOST_LABELS = 1000
SHOWN_LABELS = 5
# Names of labels beside a text, more than make a first row a header.
LABELS = (*tables.LABEL, "labels", "label_text", "emotion", "intent", "topic", "polarity", "is_spam", "spam", "toxic",
          "language", "lang", "genre", "y")  # fmt: skip
QUANTITIES = ("score", "rating", "stars", "target", "y")
TEXTS = (*tables.FIRST, *tables.TEXT, "sms", "email", "utterance", "question", "title", "headline", "body", "x")
UNREADABLE = {
    ".parquet": "pandas.read_parquet(FILE).to_csv('data.csv', index=False)",
    ".feather": "pandas.read_feather(FILE).to_csv('data.csv', index=False)",
    ".arrow": "datasets.Dataset.from_file(FILE).to_csv('data.csv')",
    ".xlsx": "pandas.read_excel(FILE).to_csv('data.csv', index=False)",
    ".xls": "pandas.read_excel(FILE).to_csv('data.csv', index=False)",
    ".pkl": "nothing here unpickles, because a pickle can run any program; write it as .csv where it was made",
    ".pt": "nothing here unpickles, because a pickle can run any program; write it as .csv where it was made",
}
NAME = re.compile(r"[^\W\d]\w*(?:[ .-]\w+){0,2}")
TAG = re.compile(r"O|[BIESLU]-[\w-]+")


@dataclass(frozen=True)
class Recognised:
    """What data is: the kind and the other settings of [data], the objective, and what was seen, for printing."""

    kind: str
    about: str
    settings: dict[str, Any] = field(default_factory=dict)
    objective: str = ""
    n_rows: int = 0


def recognise(path: Path, kind: str = "", *, answers_are_pairs: bool = True) -> Recognised:
    """What the data at a path is; `kind`, if it is given, is what it is read as, and only columns are looked for.
    `answers_are_pairs`: whether questions with answers are pairs, not conversations."""
    reject_unreadable(path)
    if path.is_dir():
        return _recognise_folder(path, kind)
    if kind in ("", "images") and is_image_data(path):
        return Recognised("images", "images as arrays, with labels")
    if not kind and _is_squad(path):
        return Recognised("answers", "questions about passages, in SQuAD's form")
    if not kind and _is_tagged(path):
        return Recognised("tagged", "words with tags, in CoNLL's columns")
    if kind in ("", "preferences") and is_preference_file(path):
        return Recognised("preferences", f"chosen and rejected answers: {_count(path):,}")
    is_table = tables.file_kind(path) in tables.TABLES or (_is_text(path) and tables.is_tabbed(path))
    if not is_table and kind in ("", "pairs") and (parallel := _parallel_file(path)) is not None:
        n_lines = sum(1 for _ in tables.numbered_lines(path))
        about = f"pairs: {n_lines:,} lines, and those of {parallel.name} that belong to them"
        return Recognised("pairs", about, {"target": str(parallel)}, "seq2seq", n_lines)
    if kind == "text" or not is_table:
        return Recognised(kind or "text", "text")
    table = Table.read(path)
    found = table.recognise(kind, answers_are_pairs=answers_are_pairs) if table is not None else None
    if found is None and kind in ("", "chat") and is_chat_file(path):
        n_rows = _count(path)
        return Recognised("chat", f"conversations: {n_rows:,}", n_rows=n_rows)
    return found or Recognised(kind or "text", "texts in a table" if not kind else "a table")


def reject_unreadable(path: Path) -> None:
    """ValueError for files that need another package to be read, with how to convert them."""
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith(".")]
    for file in files:
        how = UNREADABLE.get(file.suffix.lower())
        if how is not None and (file == path or len({f.suffix for f in files}) == 1):
            how = how.replace("FILE", repr(str(file)))
            raise ValueError(f"{file}: {file.suffix} files are not read: write it as .csv or .jsonl first: {how}")


# --- folders ---------------------------------------------------------------------------------------------------------


def _recognise_folder(folder: Path, kind: str) -> Recognised:
    if kind in ("", "images"):
        train, validation = _parts(folder)
        if is_image_data(train):
            n_images, names = count_images(train)
            about = f"images in folders: {n_images:,} images, {_listed(names)}"
            settings = {"source": str(train)} if train != folder else {}
            if validation is not None and is_image_data(validation):
                settings["validation"] = str(validation)
            return Recognised("images", about, settings, "classify", n_images)
        if kind == "images" or (_holds_images(folder) and not _holds_texts(folder)):
            raise ValueError(
                f"{folder} has images but not a folder for each class: put them in folders named after what they show, "
                f"at least two, as {folder}/cat/1.jpg and {folder}/dog/1.jpg"
            )
    return Recognised(kind or "text", "a folder of texts")


def _parts(folder: Path) -> tuple[Path, Path | None]:
    """The training and the validation images of a folder that has both as folders; else the folder itself."""
    train = folder / "train"
    held = [folder / name for name in ("val", "valid", "validation", "dev", "test")]
    return (train, next((part for part in held if part.is_dir()), None)) if train.is_dir() else (folder, None)


def _holds_images(folder: Path) -> bool:
    return any(file.suffix.lower() in ENDINGS for file in islice(folder.glob("**/*"), 1000))


def _holds_texts(folder: Path) -> bool:
    texts = {".txt", ".md", ".csv", ".tsv", ".jsonl", ".ndjson", ".gz", ".xz", ".bz2"}
    return any(file.suffix.lower() in texts for file in islice(folder.glob("**/*"), 1000))


def _parallel_file(path: Path) -> Path | None:
    """The file of another language with as many lines, beside train.de say; None if there is none, or several."""
    name = path.name.removesuffix(path.suffix) if path.suffix in tables.OPENERS else path.name
    compressed = path.name[len(name) :]
    stem, _, language = name.rpartition(".")
    if not stem or language.lower() not in tables.LANGUAGES:
        return None
    others = [path.with_name(f"{stem}.{other}{compressed}") for other in tables.LANGUAGES - {language}]
    there = [other for other in others if other.is_file()]
    return there[0] if len(there) == 1 else None


# --- single files ----------------------------------------------------------------------------------------------------


def _is_text(path: Path) -> bool:
    """Whether a file could be a table without saying so by its name: not one of arrays, and not a program."""
    return tables.file_kind(path) in ("", "txt", "tab", "text", "data", "dat")


def _is_squad(path: Path) -> bool:
    if tables.file_kind(path) != "json":
        return False
    with tables.open_text(path) as file:
        head = file.read(20_000)
    return '"paragraphs"' in head and '"context"' in head


def _is_tagged(path: Path) -> bool:
    """Whether the first lines are words with tags of entities."""
    if tables.file_kind(path) not in ("txt", "conll", "bio", "iob", "iob2", "tsv", "train", "testa", "testb"):
        return False
    try:
        lines = [line.split() for _, line in islice(tables.numbered_lines(path), 200)]
    except ValueError:
        return False
    cells = [line for line in lines if line and line[0] != "-DOCSTART-"]
    tags = {line[-1] for line in cells}
    return len(tags) > 1 and all(len(line) > 1 and TAG.fullmatch(line[-1]) for line in cells)


def _count(path: Path) -> int:
    return sum(1 for _ in tables.read_rows(path, named=True))


def _listed(labels: Sequence[str] | Counter[str]) -> str:
    """ "2 labels: ham 4,827, spam 747" """
    if isinstance(labels, Counter):
        names = [f"{name} {n:,}" for name, n in labels.most_common(SHOWN_LABELS)]
    else:
        names = list(labels[:SHOWN_LABELS])
    more = ", ..." if len(labels) > SHOWN_LABELS else ""
    return f"{len(labels):,} label{'s' * (len(labels) != 1)}: {', '.join(names)}{more}"


# --- tables ----------------------------------------------------------------------------------------------------------


class Column:
    """A column of the first rows of a table."""

    def __init__(self, name: str | int, values: Sequence[Any]) -> None:
        self.name = name
        self.values = [value for value in values if value is not None]
        texts = [str(value).strip() for value in self.values]
        self.filled = [text for text in texts if text]
        self.counts = Counter(self.filled)
        self.is_plain = all(isinstance(value, str | int | float) for value in self.values)
        self.numbers = [number for text in self.filled if (number := _number(text)) is not None]
        self.is_number = bool(self.filled) and len(self.numbers) == len(self.filled)
        n = max(1, len(self.filled))
        self.n_words = sum(len(text.split()) for text in self.filled) / n
        self.n_characters = sum(map(len, self.filled)) / n

    @property
    def is_text(self) -> bool:
        """Whether the values are words that mostly differ."""
        words = sum(any(c.isalpha() for c in text) for text in self.filled)
        strings = all(isinstance(value, str) for value in self.values)
        n = len(self.filled)
        several = len(self.counts) > max(1, n // 2) or (self.n_words >= 2 and len(self.counts) > max(2, n // 5))
        key = self.n_words < 1.05 and sum(any(c.isdigit() for c in t) for t in self.filled) > len(self.filled) // 2
        return strings and not self.is_number and several and not key and words > 0.9 * max(1, len(self.filled))

    @property
    def is_label(self) -> bool:
        """Whether the values are short, few, and repeat, by the content alone."""
        n, different = len(self.filled), len(self.counts)
        return self.is_plain and 2 <= different <= min(MOST_LABELS, max(2, n // 3)) and self.n_characters <= 40

    @property
    def is_quantity(self) -> bool:
        """Whether the values are numbers to be predicted, rather than names of classes."""
        if not self.is_number:
            return False
        scale = str(self.name).strip().lower() in QUANTITIES and len(self.counts) > 20
        return scale or not self.is_label or any(number != int(number) for number in self.numbers)

    @property
    def is_sign(self) -> bool:
        """Whether all values are 0 or 1."""
        return len(self.counts) <= 2 and set(self.counts) <= {"0", "1", "0.0", "1.0", "True", "False", "true", "false"}


class Table:
    """The first rows of a table as columns."""

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.path, self.columns = path, list(columns)
        self.by_name = {str(c.name).strip().lower(): c for c in columns if isinstance(c.name, str)}

    @classmethod
    def read(cls, path: Path) -> Table | None:
        """The columns of a file; None if it cannot be read as a table, which is said again when it is read as text."""
        try:
            names = tables.column_names(path)
            rows = list(islice(tables.read_rows(path, named=names is not None), SAMPLE))
        except ValueError:
            return None
        if not rows:
            return None
        if names is not None:
            keys = list(dict.fromkeys(key for row in rows[:50] for key in row.cells))
            cells = [row.cells for row in rows if isinstance(row.cells, dict)]
            return cls(path, [Column(str(key), [c.get(str(key)) for c in cells]) for key in keys])
        width = min(len(row.cells) for row in rows)
        lists = [row.cells for row in rows if isinstance(row.cells, list)]
        columns = [Column(i, [cells[i] for cells in lists]) for i in range(width)]
        below = [Column(i, column.values[1:]) for i, column in enumerate(columns)]
        top = [str(cell).strip() for cell in lists[0][:width]]
        if _is_header(top, below) and all(len(cells) == len(lists[0]) for cells in lists):
            named = [Column(name, column.values) for name, column in zip(top, below, strict=True)]
            columns = [column for column in named if column.name]  # a spreadsheet may have empty ones
        return cls(path, columns)

    def recognise(self, kind: str, *, answers_are_pairs: bool) -> Recognised | None:
        """What the table is; None if that is not clear, or not a matter of its columns."""
        if kind == "labelled":
            return self._labelled(wanted=True)
        if kind == "pairs":
            return self._pairs()
        if kind:
            return None
        usual = self._usual_pair()
        asks = usual is not None and usual[0].lower() in ("question", "query")
        if is_chat_file(self.path) and not (asks and answers_are_pairs):
            return None
        return self._by_names() or self._by_content()

    def _by_names(self) -> Recognised | None:
        label = self._named(LABELS)
        if self._usual_pair() is not None and not (label is not None and label.is_label):
            return self._pairs()
        if self._named(TEXTS) is not None and len(self._signs()) > 1:
            return self._labelled()
        if label is not None and (self._named(TEXTS) is not None or len(self._texts()) == 1):
            if not label.is_label and not label.is_quantity and label.is_text and label.n_words > 2:
                return self._pairs()
            return self._labelled()
        return None

    def _usual_pair(self) -> tuple[str, str] | None:
        return tables.find_pair([str(column.name) for column in self.columns])

    def _by_content(self) -> Recognised | None:
        if "text" in self.by_name or len(self.columns) == 1:
            return None
        texts = self._texts()
        labels = [column for column in self.columns if column.is_label and column not in texts]
        if len(labels) == 1 and len(texts) == 1:
            return self._labelled()
        keys = [column for column in self.columns if column not in texts]
        if len(texts) == 2 and not labels and all(column.is_number or not column.filled for column in keys):
            return self._pairs()
        if self.columns[0].name == 0 and len(self.columns) > 2 and all(column.is_text for column in self.columns[:2]):
            return self._pairs()  # Anki's files have the author in the third column
        return None

    def _labelled(self, *, wanted: bool = False) -> Recognised | None:
        """Texts with labels; of a table that is `wanted` to be that, the column with the fewest values is the label."""
        text = self._named(TEXTS) or max(self._texts(), key=lambda c: c.n_characters, default=None)
        if text is None:
            return None
        signs = [column for column in self._signs() if column is not text]
        label = self._named(LABELS)
        if len(signs) > 1 and (label is None or label in signs):
            several = ",".join(str(column.name) for column in signs)
            n_rows = _count(self.path)
            about = f"labelled texts (columns {text.name} and {several}): {n_rows:,} rows, {len(signs)} labels each"
            settings = {"text": text.name, "label": several}
            return Recognised("labelled", about, settings, "multi_label", n_rows)
        if label is None or label is text:
            others = [column for column in self.columns if column is not text and column.is_label]
            others = [column for column in others if not column.is_text] or others
            label = min(others, key=lambda c: len(c.counts), default=None) if wanted or len(others) == 1 else None
        if label is None:
            return None
        second = self._named(tables.SECOND) if str(text.name).lower() in tables.FIRST else None
        counts = self._count_labels(label)
        n_rows = sum(counts.values())
        objective = "regress" if label.is_quantity else "classify"
        has = "numbers" if objective == "regress" else _listed(counts)
        both = f" and {second.name}" if second is not None else ""
        where = f" (text in {text.name}{both}, label in {label.name})" if isinstance(text.name, str) else ""
        about = f"labelled texts{where}: {n_rows:,} rows, {has}"
        named = {"text": text.name, "label": label.name} | ({"second": second.name} if second is not None else {})
        settings = named if isinstance(text.name, str) else {}  # without names the reader finds them as we did
        return Recognised("labelled", about, settings, objective, n_rows)

    def _pairs(self) -> Recognised | None:
        names: Sequence[str | int] = self._usual_pair() or [column.name for column in self._texts()]
        if len(names) < 2:
            return None
        source, target = names[:2]
        named = isinstance(source, str)
        if not named and [source, target] != [0, 1]:
            return None  # the reader has names for columns alone
        n_rows = sum(1 for _ in tables.read_rows(self.path, named=named))
        where = f" (from {source} to {target})" if named else " (from the first column to the second)"
        settings = {"text": source, "target": target} if named else {}
        return Recognised("pairs", f"pairs of texts{where}: {n_rows:,} rows", settings, "seq2seq", n_rows)

    def _named(self, usual: Sequence[str]) -> Column | None:
        return next((self.by_name[name] for name in usual if name in self.by_name), None)

    def _texts(self) -> list[Column]:
        return [column for column in self.columns if column.is_text]

    def _signs(self) -> list[Column]:
        return [column for column in self.columns if isinstance(column.name, str) and column.is_sign]

    def _count_labels(self, label: Column) -> Counter[str]:
        rows = tables.read_rows(self.path, named=isinstance(label.name, str))
        return Counter(str(row.get(self.path, label.name)).strip() for row in rows)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 2**53 else None


def _is_header(top: Sequence[str], below: Sequence[Column]) -> bool:
    """Whether a first row without usual names is one of names: short, all different, and where a column has labels or
    numbers, none of these."""
    named = [name for name in top if name]
    if len(set(named)) != len(named) or not all(NAME.fullmatch(name) for name in named):
        return False
    strict = [(name, column) for name, column in zip(top, below, strict=True) if column.is_label or column.is_number]
    return bool(strict) and all(name and name not in column.counts for name, column in strict)
