"""Token classification data, such as named entities: sentences with a tag per word, in CoNLL format.

B sentences, T tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from heedful.data import tables
from heedful.data.classification import label_ids
from heedful.data.dataset import IGNORED, Draw
from heedful.data.ragged import RaggedArray, content_digest, lengths_if_padded, pad_ids
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.models.base import Batch
from heedful.text import Tokenizer


class TaggedSentences:
    """Sentences with a tag per word. The target is on the first token of a word; its other tokens are ignored.

    `names` are the tags in the order of their ids, "O" first.
    """

    def __init__(
        self,
        sentences: Iterable[tuple[Sequence[str], Sequence[str]]],
        tokenizer: Tokenizer,
        *,
        names: Sequence[str] | None = None,
        max_length: int | None = None,
    ) -> None:
        pairs = [(list(words), list(tags)) for words, tags in sentences]
        if not pairs:
            raise ValueError("there is no tagged sentence")
        at = [f"sentence {i + 1}" for i in range(len(pairs))]
        found = sorted({tag for _, tags in pairs for tag in tags}, key=lambda tag: (tag != "O", tag))
        self.names = tuple(found if names is None else names)
        self.notes: list[str] = []
        template = SpecialTokenTemplate(tokenizer)
        rows, targets, n_cut, n_lost = [], [], 0, 0
        for place, (words, tags) in zip(at, pairs, strict=True):
            if len(words) != len(tags):
                raise ValueError(f"{place}: {len(words)} words and {len(tags)} tags")
            numbers = label_ids(tags, list(self.names), [place] * len(tags)).tolist()
            ids, marks = tokenize_tagged_words(tokenizer, words, numbers)
            n_lost += len(words) - sum(mark != IGNORED for mark in marks)
            row = template.wrap(ids, max_length)
            n_inside = len(row) - len(template.before) - len(template.after)
            n_cut += n_inside < len(ids)
            around = [IGNORED] * len(template.before), [IGNORED] * len(template.after)
            rows.append(row)
            targets.append([*around[0], *marks[:n_inside], *around[1]])
        if n_cut:
            self.notes.append(
                f"{n_cut} of {len(rows)} sentences are longer than {max_length} tokens: their ends are cut"
            )
        if n_lost:
            self.notes.append(f"{n_lost} words have no piece in this tokenizer, and no tag is learned from them")
        self.rows, self.marks = RaggedArray(rows), RaggedArray(targets)

    @classmethod
    def read(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        *,
        column: int = -1,
        names: Sequence[str] | None = None,
        max_length: int | None = None,
    ) -> TaggedSentences:
        """Read a CoNLL file: the word is the first column, the tag the last, or `column`."""
        return cls(read_tagged(Path(path), column), tokenizer, names=names, max_length=max_length)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("tagged", self.rows, self.marks, self.names)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each example in tokens, for batches of similar lengths."""
        return self.rows.lengths

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        rows = [self.rows[d.index] for d in draws]
        targets = pad_ids([self.marks[d.index] for d in draws], IGNORED)
        return Batch(pad_ids(rows, 0), lengths_if_padded(rows), targets=targets)


def read_tagged(path: Path, column: int = -1) -> list[tuple[list[str], list[str]]]:
    """Sentences of (words, tags), with empty lines between them; tags are converted to IOB2."""
    sentences: list[tuple[list[str], list[str]]] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in [*tables.numbered_lines(path), (0, "")]:
        cells = line.split()
        if cells and cells[0] != "-DOCSTART-":
            if len(cells) < 2 or not -len(cells) <= column < len(cells):
                raise ValueError(f"{path}, line {number}: a word and its tag are expected, not {line[:50]!r}")
            words.append(cells[0])
            tags.append(cells[column])
        elif words:
            sentences.append((words, to_iob2(tags)))
            words, tags = [], []
    return sentences


def to_iob2(tags: list[str]) -> list[str]:
    """Convert IOB1 tags, as in CoNLL-2003, to IOB2: every entity begins with B-, not only one right after another of
    the same type. Other tags (parts of speech) are unchanged."""
    if not all(tag == "O" or tag.startswith(("B-", "I-")) for tag in tags):
        return tags
    before = ["O", *tags[:-1]]
    return [
        "B-" + tag[2:] if tag.startswith("I-") and last[2:] != tag[2:] else tag
        for tag, last in zip(tags, before, strict=True)
    ]


def tokenize_tagged_words(
    tokenizer: Tokenizer, words: Sequence[str], marks: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The ids of a sentence, and for each the mark of its word if it is the word's first token, else IGNORED."""
    text = " ".join(words)
    ends = np.cumsum([len(word) + 1 for word in words])  # end of the space after each word
    ids, found, seen = [], [], -1
    for index, begin, end in tokenizer.encode_with_offsets(text):
        # A token may include the space before its word (GPT-2, T5), so the word is that of its last character.
        word = int(np.searchsorted(ends, max(begin, end - 1), side="right"))
        ids.append(index)
        first = word > seen and not text[begin:end].isspace() and end > begin
        found.append(marks[word] if first else IGNORED)
        seen = word if first else seen
    return ids, found
