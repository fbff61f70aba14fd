"""Prompts whose completions are sampled and rewarded by a rule (GRPO), each with the answer that the rule wants.

    {"prompt": "12+34=", "answer": "46"}                                                   a text
    {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46"}          messages

A prompt is written by the model's chat template, up to where its answer begins; without a template it is the text as it
stands. The answer may be a text, a number, or a JSON schema as an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heedful.data import tables
from heedful.data.chats import ANSWERS, PROMPTS
from heedful.data.dataset import Draw
from heedful.data.ragged import RaggedArray, content_digest, lengths_if_padded, pad_ids
from heedful.models.base import Batch
from heedful.text import Tokenizer
from heedful.text.chat import check_messages
from heedful.text.chat_answers import is_answer, render_many

MORE_ANSWERS = (*ANSWERS, "solution", "target", "ground_truth")


class Prompts:
    """Prompts as token ids, with their answers. `targets` (B, 2) of a batch are the number of each prompt, by which
    `answers` has its answer, and a seed to sample by."""

    lengths: None = None  # prompts are short beside what they are completed with

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[str]) -> None:
        if not prompts:
            raise ValueError("there is no prompt")
        self.ids, self.answers = RaggedArray(prompts), list(answers)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data."""
        return content_digest("prompts", self.ids, *self.answers)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The prompts of these draws as one padded batch."""
        rows = [self.ids[draw.index] for draw in draws]
        seeds = [int(draw.random(seed).integers(2**31)) for draw in draws]
        targets = torch.tensor(list(zip((draw.index for draw in draws), seeds, strict=True)))
        return Batch(pad_ids(rows, 0), lengths_if_padded(rows), targets=targets)


def read_prompts(
    path: Path, tokenizer: Tokenizer, *, prompt: str = "", answer: str = ""
) -> tuple[list[list[int]], list[str]]:
    """Token ids and answers of the prompts in a jsonl, csv or tsv file; `prompt` and `answer` name their columns."""
    texts: list[Any] = []
    answers = []
    for row in tables.read_rows(path, named=True):
        assert isinstance(row.cells, dict)
        try:
            asked, answered = _find_prompt(row.cells, prompt, answer)
            texts.append(_as_messages(asked) if tokenizer.chat_template is not None else _as_text(asked))
        except ValueError as problem:
            raise ValueError(f"{path}, line {row.number}: {problem}") from None
        answers.append(answered)
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text, add_special=True) for text in texts], answers
    rendered = render_many(tokenizer, [(messages, {}) for messages in texts], True)
    return [[index for index, _, _ in tokens] for tokens in tokenizer.encode_rendered(*rendered)], answers


def _find_prompt(cells: Mapping[str, Any], prompt: str, answer: str) -> tuple[Any, str]:
    """The prompt of a row, and its answer as a text."""
    name = prompt or next((name for name in (*PROMPTS, "messages") if name in cells), "")
    other = answer or next((name for name in MORE_ANSWERS if name in cells), "")
    if name not in cells or other not in cells:
        raise ValueError(
            f"no prompt with the answer that its completions are compared with; it has: {', '.join(cells)}; say which "
            'they are: data.text = "NAME" and data.target = "NAME"'
        )
    answered = cells[other]
    return cells[name], answered if isinstance(answered, str) else json.dumps(answered)


def _as_text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise ValueError("the prompt is a list of messages, and the model's tokenizer has no chat template to write it")
    return prompt


def _as_messages(prompt: Any) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    check_messages(turns)
    while turns and is_answer(turns[-1]):
        turns = turns[:-1]  # what is to be sampled
    return [dict(turn) for turn in turns]
