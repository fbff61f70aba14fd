"""Conversations for fine-tuning a chat model: the loss is on the assistant's answers alone.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}    OpenAI's format
    {"prompt": "Hello", "completion": "Hi!"}    pairs: also of "question" and "answer", "instruction" and "output" ...
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]}        ShareGPT's

Each conversation is written by the model's own chat template (`heedful.text.chat_answers`). Without a template, pairs
are the prompt, the answer and the token that ends a text. Several conversations are packed into a row, whole, and
attention stays inside each (Krell et al. 2021, "Efficient sequence packing without cross-contamination").

B rows, T positions
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from heedful.data import tables
from heedful.data.dataset import IGNORED, Draw
from heedful.data.ragged import RaggedArray, content_digest, lengths_if_padded, pad_ids
from heedful.models.base import Batch
from heedful.text import Tokenizer
from heedful.text.chat import check_messages
from heedful.text.chat_answers import RewritingTemplateError, is_answer, tokenize_answers, tokenize_many_answers

PROMPTS = ("prompt", "question", "instruction", "query")
ANSWERS = ("completion", "answer", "response", "output")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}

TOGETHER = 256  # conversations that are tokenized in one go

Tokens = tuple[list[int], list[bool]]  # ids, and which of them are learned


class Chats:
    """Packed rows of conversations, each of token ids and whether the assistant wrote them.

    Longer ones than `max_length` are cut at their end; `notes` have their number, and that of those left out because
    nothing of an answer was left.
    """

    lengths: None = None  # all rows are nearly full

    def __init__(self, conversations: Sequence[Tokens], max_length: int) -> None:
        self.notes: list[str] = []
        n_long = sum(len(ids) > max_length for ids, _ in conversations)
        kept = [(ids[:max_length], own[:max_length]) for ids, own in conversations if any(own[1:max_length])]
        if n_long:
            self.notes.append(
                f"{n_long} of {len(conversations)} conversations are longer than {max_length} tokens and are cut: "
                "data.length is the limit"
            )
        if n_lost := len(conversations) - len(kept):
            self.notes.append(f"{n_lost} of {len(conversations)} conversations have nothing to learn and are left out")
        if not kept:
            raise ValueError("no conversation is left: " + ("; ".join(self.notes) or "there is none"))
        self.ids = RaggedArray(ids for ids, _ in kept)
        self.learned = RaggedArray(np.array(own, dtype=np.int32) for _, own in kept)
        self.rows = pack_rows(self.ids.lengths, max_length)
        self.width = max(int(self.ids.lengths[row].sum()) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_learned(self) -> int:
        """The number of tokens with a loss."""
        return int(self.learned.values.sum())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("chats", self.ids, self.learned, self.width)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The rows of these draws, with targets[t] = tokens[t + 1] where the assistant wrote it."""
        tokens, targets, documents = [], [], []
        for draw in draws:
            row = self.rows[draw.index]
            tokens.append(np.concatenate([self.ids[i] for i in row]))
            following = [np.where(self.learned[i][1:] > 0, self.ids[i][1:], IGNORED) for i in row]
            targets.append(np.concatenate([np.append(part, IGNORED) for part in following]))
            documents.append(np.repeat(np.arange(len(row)), self.ids.lengths[row]))
        last = max(len(row) for row in (self.rows[d.index] for d in draws))  # padding is a document of its own
        return Batch(
            tokens=pad_ids(tokens, 0, self.width),
            lengths=lengths_if_padded(tokens, self.width),
            documents=pad_ids(documents, last, self.width),
            targets=pad_ids(targets, IGNORED, self.width),
        )


def pack_rows(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Indices of whole items in rows of at most `size` tokens: the longest first, each into the fullest row that has
    room (best-fit decreasing)."""
    rows: list[list[int]] = []
    of_room: dict[int, list[int]] = {}  # rows by the tokens that are left in them
    for i in np.argsort(-lengths, kind="stable").tolist():
        n = int(lengths[i])
        room = next((room for room in range(n, size + 1) if of_room.get(room)), None)
        row = len(rows) if room is None else of_room[room].pop()
        if room is None:
            rows.append([])
            room = size
        rows[row].append(i)
        of_room.setdefault(room - n, []).append(row)
    return [np.array(row, dtype=np.int64) for row in rows]


def read_chats(path: Path, tokenizer: Tokenizer, *, prompt: str = "", answer: str = "") -> list[Tokens]:
    """Tokenize the conversations of a jsonl, csv or tsv file; `prompt` and `answer` name the columns of pairs."""

    def tokenize(rows: Sequence[tables.TableRow]) -> list[Tokens]:
        if tokenizer.chat_template is not None:
            with suppress(ValueError):  # one of them is wrong, or written in another way: said below
                chats = [to_messages(cells_of(row), prompt, answer) for row in rows]
                return tokenize_many_answers(tokenizer, chats)
        found = []
        for row in rows:
            try:
                found += _tokenize_row(tokenizer, cells_of(row), prompt, answer)
            except ValueError as problem:
                raise ValueError(f"{path}, line {row.number}: {problem}") from None
        return found

    def cells_of(row: tables.TableRow) -> dict[str, Any]:
        assert isinstance(row.cells, dict)
        return row.cells

    rows = iter(tables.read_rows(path, named=True))
    batches = iter(lambda: list(islice(rows, TOGETHER)), [])
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:  # templates run in other processes
        return [tokens for batch in threads.map(tokenize, batches) for tokens in batch]


def _tokenize_row(tokenizer: Tokenizer, cells: Mapping[str, Any], prompt: str, answer: str) -> list[Tokens]:
    messages, variables = to_messages(cells, prompt, answer)
    if tokenizer.chat_template is None and "messages" not in cells and len(messages) == 2:
        return [plain_pair(tokenizer, *(message["content"] for message in messages))]
    return list(tokenize_chat(tokenizer, messages, **variables))


def tokenize_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Iterator[Tokens]:
    """The tokens of a conversation. A template that writes past answers otherwise than the last one, without their
    reasoning say, gives an example for each answer, of the conversation up to it."""
    try:
        yield tokenize_answers(tokenizer, messages, **variables)
    except RewritingTemplateError:
        answers = [i for i, message in enumerate(messages) if is_answer(message)]
        for i in answers:
            before = [{**m, "weight": 0} if is_answer(m) else m for m in messages[:i]]
            yield tokenize_answers(tokenizer, [*before, messages[i]], **variables)


def plain_pair(tokenizer: Tokenizer, prompt: str, answer: str) -> Tokens:
    """Prompt, answer and the token that ends a text, for models without a chat template."""
    before, after = tokenizer.encode(prompt, add_special=True), tokenizer.encode(answer)
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return [*before, *after, *ends], [False] * len(before) + [True] * (len(after) + len(ends))


def is_chat_file(path: Path) -> bool:
    """Whether a table has conversations or prompts with answers, by its first row."""
    if tables.file_kind(path) not in tables.TABLES or not path.is_file():
        return False
    try:
        row = next(tables.read_rows(path, named=True), None)
    except ValueError:
        return False  # said again, with what to do, when the file is read as text
    cells = row.cells if row is not None and isinstance(row.cells, dict) else {}
    return _find_key(cells, "") is not None or _find_pair(cells) is not None


def to_messages(
    cells: Mapping[str, Any], prompt: str = "", answer: str = ""
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a row in one of the formats above, and the tools that its template is given."""
    variables = {"tools": cells["tools"]} if cells.get("tools") else {}
    key = None if answer else _find_key(cells, prompt)
    if key is not None:
        turns = [_sharegpt(turn) if "from" in turn else dict(turn) for turn in cells[key] if isinstance(turn, Mapping)]
        if len(turns) != len(cells[key]):
            raise ValueError(f"{key} must be a list of objects with a role and a content")
        check_messages(turns)
        return turns, variables
    pair = (prompt, answer) if prompt and answer else _find_pair(cells)
    if pair is None or not all(name in cells for name in pair):
        raise ValueError(
            f'no "messages", and no prompt with its answer; it has: {", ".join(cells)}; say which they are: '
            'data.text = "NAME" and data.target = "NAME"'
        )
    asked, answered = (cells[name] for name in pair)
    if isinstance(asked, list) and isinstance(answered, list):  # both are messages
        turns = [*asked, *answered]
        check_messages(turns)
        return turns, variables
    if not (isinstance(asked, str) and isinstance(answered, str)):
        raise ValueError(f"{pair[0]} and {pair[1]} must be texts")
    if pair[0] == "instruction" and isinstance(cells.get("input"), str) and cells["input"]:  # Alpaca's
        asked = f"{asked}\n\n{cells['input']}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}], variables


def _find_key(cells: Mapping[str, Any], name: str) -> str | None:
    names = (name,) if name else ("messages", "conversations", "conversation")
    return next((n for n in names if isinstance(cells.get(n), list)), None)


def _find_pair(cells: Mapping[str, Any]) -> tuple[str, str] | None:
    asked = next((name for name in PROMPTS if name in cells), None)
    answered = next((name for name in ANSWERS if name in cells), None)
    return None if asked is None or answered is None else (asked, answered)


def _sharegpt(turn: Mapping[str, Any]) -> dict[str, Any]:
    speaker = turn["from"]
    if speaker not in SHAREGPT_ROLES:
        raise ValueError(f"a message is from {speaker!r}: {', '.join(SHAREGPT_ROLES)} are known")
    return {"role": SHAREGPT_ROLES[speaker], "content": turn.get("value")}
