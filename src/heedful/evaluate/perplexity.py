"""Perplexity and bits per byte of a text under a causal language model, by a strided sliding window.

Windows of `window` tokens advance by `stride`; each scores the tokens that no earlier window scored, so that every
token but the first is scored once, and from the second window on with at least `window - stride` tokens of context. A
smaller stride gives more context and takes longer.

    perplexity     exp(mean of -log p(token | the tokens before it in the window))     depends on the tokenizer
    bits per byte  sum of -log2 p / bytes of the scored text in UTF-8                  does not
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heedful.data import tables
from heedful.evaluate.bootstrap import Metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task
from heedful.generate.scheduler import bucket_by_length
from heedful.models.base import Batch, DecoderModel, Model
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown

MAX_BATCH = 8192  # tokens of a padded batch, since the logits of all may be asked for


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


def negative_log_likelihood(model: Model, ids: Sequence[int], *, window: int, stride: int) -> float:
    """The sum of -log p of all tokens but the first, in nats."""
    if len(ids) < 2:
        raise ValueError("a text of at least two tokens is needed")
    tokens = torch.tensor(ids)
    return sum(score_windows(model, tokens, [part])[0] for part in sliding_windows(len(ids), window, stride))


@torch.inference_mode()
def score_windows(model: Model, tokens: Tensor, windows: Sequence[Window]) -> list[float]:
    """The sum of -log p of the new tokens of each window, in nats; windows of one length are one batch."""
    if not isinstance(model, DecoderModel) or "generate" not in model.abilities:
        raise ValueError(f"perplexity is for models that read from left to right; this is a {model.family}")
    model.check_length(max(part.end - part.begin for part in windows))
    was_training = model.training
    model.eval()
    found = []
    for _, group in groupby(windows, key=lambda part: part.end - part.begin):
        parts = list(group)
        inputs = torch.stack([tokens[part.begin : part.end] for part in parts]).to(model.device)
        hidden = model.hidden(Batch(inputs), model.scoring_state(len(inputs)))  # (B, T, E)
        for row, part in zip(hidden, parts, strict=True):  # one at a time, since logits are large
            logits = model.head(row[-part.n_new :]).float()  # (new, V)
            targets = tokens[part.end + 1 - part.n_new : part.end + 1].to(model.device)
            found.append(F.cross_entropy(logits, targets, reduction="sum").item())
    model.train(was_training)
    return found


@torch.inference_mode()
def score_continuations(model: DecoderModel, texts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
    """The log-probability of the last n tokens of each text (its ids and n), and whether all of them are the likeliest;
    in batches of similar lengths, padded on the right, where a causal model does not see it."""
    found: dict[int, tuple[float, bool]] = {}
    for bucket in bucket_by_length(range(len(texts)), lambda i: len(texts[i][0])):
        n_rows = max(1, MAX_BATCH // len(texts[bucket[0]][0]))
        for rows in (bucket[begin : begin + n_rows] for begin in range(0, len(bucket), n_rows)):
            ids = [torch.tensor(texts[i][0], device=model.device) for i in rows]
            counts = [texts[i][1] for i in rows]
            inputs = pad_sequence([row[:-1] for row in ids], batch_first=True)
            hidden = model.hidden(Batch(inputs), model.scoring_state(len(inputs)))  # (B, T, E)
            scored = [h[len(row) - 1 - n : len(row) - 1] for h, row, n in zip(hidden, ids, counts, strict=True)]
            logs = model.head(torch.cat(scored)).float().log_softmax(-1)  # (all new, V)
            targets = torch.cat([row[-n:] for row, n in zip(ids, counts, strict=True)])
            own = logs.gather(1, targets[:, None])[:, 0]
            likeliest = own == logs.amax(-1)
            own, likeliest = own.cpu(), likeliest.cpu()
            for i, some, top in zip(rows, own.split(counts), likeliest.split(counts), strict=True):
                found[i] = float(some.double().sum()), bool(top.all())
    return [found[i] for i in range(len(texts))]


@dataclass(frozen=True)
class Perplexity(Task):
    """Perplexity and bits per byte of a text; an item is a window."""

    about: ClassVar[str] = "perplexity and bits per byte of a text under a model that continues it"
    reads: ClassVar[str] = "a text file, also .gz, .xz or .bz2"
    batch_size: ClassVar[int] = 4

    window: int = 0  # tokens that the model reads at a time; by default its context length, at most 1024
    stride: int = 0  # by how many the window advances; by default half of it

    def resolved(self, loaded: LoadedModel) -> Task:
        """The window and the stride for this model."""
        model = loaded.model
        if not isinstance(model, DecoderModel) or "generate" not in model.abilities or loaded.tokenizer is None:
            raise ValueError(
                f"perplexity is for models that continue a text; {loaded.name} is a {model.family}, and can "
                f"{', '.join(model.abilities)}"
            )
        window = self.window or min(loaded.model.context_length or 1024, 1024)
        loaded.model.check_length(window)
        stride = self.stride or max(1, window // 2)
        next(sliding_windows(2, window, stride), None)  # refuses a stride that does not fit
        return replace(self, window=window, stride=stride)

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """The windows of the text with the token ids of all of it. A tokenizer's own token for the begin of a text
        stands in front; without one, the first token is not scored."""
        tokenizer = loaded.tokenizer
        assert tokenizer is not None, "resolved has checked it"
        with tables.open_text(paths[0]) as file:
            text = file.read()
        encoded = tokenizer.encode_with_offsets(text)
        around = tokenizer.encode("", add_special=True)
        first = around[:1] if loaded.bos_id is not None and around[:1] == [loaded.bos_id] else []
        tokens = torch.tensor([*first, *(index for index, _, _ in encoded)])
        begins = [*[0 for _ in first], *(begin for _, begin, _ in encoded), len(text)]
        if len(tokens) < 2:
            raise ValueError(f"{paths[0]} has {len(encoded)} tokens: perplexity needs two at least")
        warn_if_unknown(tokenizer, [text])
        found = []
        for i, part in enumerate(sliding_windows(len(tokens), self.window, self.stride)):
            a, b = begins[part.end + 1 - part.n_new], begins[part.end + 1]  # the characters of the new tokens
            found.append(Item(str(i), (tokens, part), len(text[a:b].encode("utf-8")), f"characters {a} to {b}"))
        return found

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The negative log-likelihood of each window's new tokens in nats; its score is that per token."""
        parts = [item.input[1] for item in items]
        found = score_windows(loaded.model, items[0].input[0], parts)
        return [
            {"prediction": total, "score": total / part.n_new, "tokens": part.n_new, "bytes": item.reference}
            for item, part, total in zip(items, parts, found, strict=True)
        ]

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """Perplexity and bits per byte; both are better when lower."""
        sums = np.array([[r["prediction"], r["tokens"], r["bytes"]] for r in records], dtype=float)  # (N, 3)

        def ratio(counts: np.ndarray, below: int) -> np.ndarray:
            nats, units = (counts @ sums[:, i] for i in (0, below))
            return nats / np.maximum(units, 1)

        return [
            Metric("perplexity", lambda counts: np.exp(ratio(counts, 1)), "", higher_is_better=False),
            Metric("bits per byte", lambda counts: ratio(counts, 2) / math.log(2), "", higher_is_better=False),
        ]

    def details(self, records: Sequence[Record]) -> dict[str, Any]:
        """How many tokens and bytes were scored."""
        return {key: sum(r[key] for r in records) for key in ("tokens", "bytes")}
