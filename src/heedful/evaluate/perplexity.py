"""Perplexity and bits per byte of a text under a causal language model, by a strided sliding window.

Windows of `window` tokens advance by `stride`; each scores the tokens that no earlier window scored, so that every
token but the first is scored once, and from the second window on with at least `window - stride` tokens of context. A
smaller stride gives more context and takes longer.

    perplexity     exp(mean of -log p(token | the tokens before it in the window))     depends on the tokenizer
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
class TextScore:
    """The negative log-likelihood of a text (natural logarithm), and its length in tokens and bytes."""

    total: float
    n_tokens: int
    n_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(mean negative log-likelihood per token)."""
        return math.exp(self.total / self.n_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits per byte of UTF-8."""
        return self.total / math.log(2) / self.n_bytes


@dataclass(frozen=True)
class Window:
    """Inputs tokens[begin:end], targets tokens[begin + 1 : end + 1], of which the last `n_new` are scored."""

    begin: int
    end: int
    n_new: int


def sliding_windows(n_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """The windows over a text; every token but the first is scored in exactly one."""
    if not 1 <= stride <= window:
        raise ValueError(f"a stride of {stride} in windows of {window}: it must be from 1 to the window")
    scored = 1
    for begin in range(0, n_tokens, stride):
        end = min(begin + window, n_tokens - 1)
        if end + 1 > scored:
            yield Window(begin, end, end + 1 - scored)
        scored = max(scored, end + 1)


def score_text(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    *,
    window: int = 1024,
    stride: int = 512,
    begin: int | None = None,
) -> TextScore:
    """Score a text; with a `begin` token in front, its first token is scored too."""
    tokens = tokenizer.encode_with_offsets(text)
    ids = [token for token, _, _ in tokens]
    if begin is not None:
        ids, scored = [begin, *ids], text
    else:
        scored = text[tokens[1][1] :] if len(tokens) > 1 else ""
    total = negative_log_likelihood(model, ids, window=window, stride=stride)
    return TextScore(total, len(ids) - 1, len(scored.encode("utf-8")))


@torch.inference_mode()
def negative_log_likelihood(model: Model, ids: Sequence[int], *, window: int, stride: int) -> float:
    """The sum of -log p of all tokens but the first, in nats."""
    if not isinstance(model, DecoderModel):
        raise ValueError(f"perplexity is for models that read from left to right; this is a {model.family}")
    if len(ids) < 2:
        raise ValueError("a text of at least two tokens is needed")
    model.check_length(min(window, len(ids) - 1))
    was_training = model.training
    model.eval()
    tokens = torch.tensor(ids, device=model.device)
    total = 0.0
    for part in with_progress_bar(list(sliding_windows(len(ids), window, stride)), "scoring"):
        hidden = model.hidden(Batch(tokens[None, part.begin : part.end]))  # (1, T, E)
        logits = model.head(hidden[0, -part.n_new :]).float()  # (new, V)
        targets = tokens[part.end + 1 - part.n_new : part.end + 1]
        total += F.cross_entropy(logits, targets, reduction="sum").item()
    model.train(was_training)
    return total


def with_progress_bar(parts: Sequence[Window], label: str) -> Iterator[Window]:
    """Yield the windows; after 2 seconds a progress bar appears on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task, began = bar.add_task(label, total=len(parts), visible=False), time.monotonic()
        for part in parts:
            yield part
            bar.update(task, advance=1, visible=time.monotonic() - began > 2)
