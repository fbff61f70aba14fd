"""Pairs of answers, one chosen and one rejected, for preference training (DPO), in the formats of TRL and the hub.

    {"prompt": "Hello", "chosen": "Hi!", "rejected": "Go away."}                     texts
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}             messages
    {"chosen": [messages], "rejected": [messages]}                                   the prompt is how both begin
    {"prompt": "Hello", "chosen": [all messages], "rejected": [all messages]}        as UltraFeedback has them

Prompts and answers are written by the model's chat template; without one they are the prompt, the answer and the token
that ends a text. Two texts without a prompt, transcripts, are never written by a template. The answer is what the
assistant says after the prompt; what it says in the prompt is not compared.

    B pairs, T positions
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from heedful.data import tables
from heedful.data.chats import PROMPTS, TOGETHER, Tokens, plain_pair
from heedful.data.dataset import IGNORED, Draw
from heedful.data.ragged import RaggedArray, content_digest, pad_ids
from heedful.models.base import Batch
from heedful.text import Tokenizer
from heedful.text.chat import Messages, check_messages
from heedful.text.chat_answers import is_answer, tokenize_many_answers


class Preferences:
    """Pairs of a chosen and a rejected answer with their prompt, as token ids and whether each is of the answer.

    Longer ones than `max_length` are cut at their end; `notes` have their number, and that of the pairs left out
    because nothing of an answer was left.
    """

    def __init__(self, pairs: Sequence[tuple[Tokens, Tokens]], max_length: int) -> None:
        self.notes: list[str] = []
        n_long = sum(any(len(ids) > max_length for ids, _ in pair) for pair in pairs)
        kept = [pair for pair in pairs if all(any(own[1:max_length]) for _, own in pair)]
        if n_long:
            self.notes.append(f"{n_long} of {len(pairs)} pairs have an answer that is cut: data.length is the limit")
        if n_lost := len(pairs) - len(kept):
            self.notes.append(f"{n_lost} of {len(pairs)} pairs have no answer to compare and are left out")
        if not kept:
            raise ValueError("no pair is left: " + ("; ".join(self.notes) or "there is none"))
        rows = [tokens for pair in kept for tokens in pair]
        self.ids = RaggedArray(ids[:max_length] for ids, _ in rows)  # chosen, rejected, chosen, ...
        self.learned = RaggedArray(np.array(own[:max_length], dtype=np.int32) for _, own in rows)
        self.lengths = self.ids.lengths.reshape(-1, 2).max(axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data."""
        return content_digest("preferences", self.ids, self.learned)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The pairs of these draws: tokens and targets (B, 2, T), targets[t] = tokens[t + 1] in the answers."""
        rows = [2 * draw.index + i for draw in draws for i in range(2)]
        tokens = [self.ids[row] for row in rows]
        following = [np.where(self.learned[row][1:] > 0, self.ids[row][1:], IGNORED) for row in rows]
        width = max(map(len, tokens))
        return Batch(
            pad_ids(tokens, 0).view(-1, 2, width),
            torch.tensor([len(row) for row in tokens]).view(-1, 2),
            targets=pad_ids(following, IGNORED, width).view(-1, 2, width),
        )


def read_preferences(path: Path, tokenizer: Tokenizer, *, prompt: str = "") -> list[tuple[Tokens, Tokens]]:
    """Tokenize the pairs of a jsonl, csv or tsv file; `prompt` names the column of prompts."""
    rows = iter(tables.read_rows(path, named=True))
    found: list[tuple[Tokens, Tokens]] = []
    while some := list(islice(rows, TOGETHER)):
        pairs: list[Texts | Conversations] = []
        for row in some:
            try:
                pairs.append(_read_pair(row.cells, prompt, template=tokenizer.chat_template is not None))
            except ValueError as problem:
                raise ValueError(f"{path}, line {row.number}: {problem}") from None
        chats: list[tuple[Messages, dict[str, Any]]] = []
        chats += [(talk, {}) for pair in pairs if isinstance(pair, Conversations) for talk in pair]
        written = iter(tokenize_many_answers(tokenizer, chats) if chats else ())
        for pair in pairs:
            if isinstance(pair, Conversations):
                found.append((next(written), next(written)))
            else:
                found.append(tuple(plain_pair(tokenizer, pair.prompt, answer) for answer in pair[1:]))  # type: ignore[arg-type]
    return found


def is_preference_file(path: Path) -> bool:
    """Whether a table has chosen and rejected answers, by its first row."""
    if tables.file_kind(path) not in tables.TABLES or not path.is_file():
        return False
    try:
        row = next(tables.read_rows(path, named=True), None)
    except ValueError:
        return False  # said again, with what to do, when the file is read
    return row is not None and isinstance(row.cells, dict) and {"chosen", "rejected"} <= row.cells.keys()


class Texts(NamedTuple):
    """A pair as plain texts."""

    prompt: str
    chosen: str
    rejected: str


class Conversations(NamedTuple):
    """A pair as whole conversations; the assistant's messages before the answer have the weight 0."""

    chosen: list[dict[str, Any]]
    rejected: list[dict[str, Any]]


def _read_pair(cells: Any, prompt: str, *, template: bool) -> Texts | Conversations:
    """The pair of a row in one of the formats above; `template`: whether a chat template writes it."""
    name = prompt or next((name for name in PROMPTS if name in cells), "")
    if not {"chosen", "rejected"} <= cells.keys() or (prompt and prompt not in cells):
        raise ValueError(f'a pair has a "prompt", the "chosen" and the "rejected" answer; it has: {", ".join(cells)}')
    asked, answers = cells.get(name), [cells["chosen"], cells["rejected"]]
    if all(isinstance(answer, str) for answer in answers) and isinstance(asked, str | None):
        if asked is None:
            return _split_transcripts(*answers)
        if not template:
            return Texts(asked, *answers)
        answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    if not all(isinstance(answer, list) for answer in answers) or not isinstance(asked, str | list | None):
        raise ValueError("chosen and rejected must both be texts, or both lists of messages")
    if not template:
        raise ValueError("the pair is of messages, and the model's tokenizer has no chat template to write them")
    for turns in answers:
        check_messages(turns)
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if before is None or not is_answer(answers[0][0]):  # whole conversations, with the prompt
        n = _n_shared(*answers)
        before, answers = answers[0][:n], [turns[n:] for turns in answers]
    if not all(any(map(is_answer, turns)) for turns in answers):
        raise ValueError("each side must have an answer of the assistant's that the other one has not")
    before = [{**turn, "weight": 0} if is_answer(turn) else turn for turn in before]
    check_messages(before or answers[0])
    return Conversations(*([*before, *turns] for turns in answers))


def _n_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _split_transcripts(chosen: str, rejected: str) -> Texts:
    """Two transcripts as the words that both begin with, and the rest of each."""
    n = max(chosen.rfind(space, 0, _n_shared(chosen, rejected)) + 1 for space in " \n")
    if not n:
        raise ValueError("the two texts do not begin with the same words: give their prompt")
    return Texts(chosen[:n], chosen[n:], rejected[n:])
