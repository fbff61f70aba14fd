"""How well a causal model foresees a text: perplexity and bits per byte.

The text is one row of tokens, too long to read at once. Windows of `window` tokens follow each other in steps of
`stride`; each scores the tokens that no window before it scored, so that every token but the first is scored once,
and from the second window on with at least `window - stride` tokens before it. The smaller the stride, the more a
token knows of its past, and the longer it takes.

    perplexity     exp(mean of -log p(token | what stands before it in the window))   depends on the tokenizer
    bits per byte  sum of -log2 p / bytes of the scored text in UTF-8                  does not
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from heedful.models.base import Batch, DecoderModel, Model
from heedful.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Foresight:
    """The sum of -log p (natural) over the tokens scored, and how much text they are."""

    total: float
    n_tokens: int
    n_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.total / self.n_tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.total / math.log(2) / self.n_bytes


@dataclass(frozen=True)
class Window:
    """Reads the tokens from `begin` to `end`, and scores the last `n_new` of those from begin + 1 to end + 1."""

    begin: int
    end: int
    n_new: int


def windows(n_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Every token but the first is new in exactly one window."""
    if not 1 <= stride <= window:
        raise ValueError(f"a stride of {stride} in windows of {window}: it must be from 1 to the window")
    scored = 1
    for begin in range(0, n_tokens, stride):
        end = min(begin + window, n_tokens - 1)
        if end + 1 > scored:
            yield Window(begin, end, end + 1 - scored)
        scored = max(scored, end + 1)


def foresee(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    *,
    window: int = 1024,
    stride: int = 512,
    begin: int | None = None,
) -> Foresight:
    """Score a text. With a token to `begin` with the first token is scored too, else it is only read."""
    tokens = tokenizer.encode_with_offsets(text)
    ids = [token for token, _, _ in tokens]
    if begin is not None:
        ids, read = [begin, *ids], text
    else:
        read = text[tokens[1][1] :] if len(tokens) > 1 else ""
    total = score(model, ids, window=window, stride=stride)
    return Foresight(total, len(ids) - 1, len(read.encode("utf-8")))


@torch.inference_mode()
def score(model: Model, ids: Sequence[int], *, window: int, stride: int) -> float:
    """The sum of -log p of all tokens but the first."""
    if not isinstance(model, DecoderModel):
        raise ValueError(f"perplexity is for models that read from left to right; this is a {model.family}")
    if len(ids) < 2:
        raise ValueError("a text of at least two tokens is needed")
    model.check_length(min(window, len(ids) - 1))
    was_training = model.training
    model.eval()
    tokens = torch.tensor(ids, device=model.device)
    total = 0.0
    for part in shown(list(windows(len(ids), window, stride)), "scoring"):
        hidden = model.hidden(Batch(tokens[None, part.begin : part.end]))  # (1, T, E)
        logits = model.head(hidden[0, -part.n_new :]).float()  # (new, V)
        targets = tokens[part.end + 1 - part.n_new : part.end + 1]
        total += F.cross_entropy(logits, targets, reduction="sum").item()
    model.train(was_training)
    return total


def shown(parts: Sequence[Window], label: str) -> Iterator[Window]:
    """The same one by one; once it has taken 2 seconds, a bar tells how far it is."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task, began = bar.add_task(label, total=len(parts), visible=False), time.monotonic()
        for part in parts:
            yield part
            bar.update(task, advance=1, visible=time.monotonic() - began > 2)
