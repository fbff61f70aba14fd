"""How many answers of an encoder-decoder to a dataset are right: symbols, and whole sequences."""

from __future__ import annotations

from typing import Any, cast

from heedful.data.dataset import IGNORED, Dataset, Draw
from heedful.generate.batch import greedy_batch
from heedful.models.base import Batch, GenerativeModel, Model

LIMIT = 2000  # examples that are answered


def right_answers(model: Model, data: Dataset, limit: int = LIMIT) -> tuple[float, float]:
    """The shares of symbols and of whole sequences that greedy answers to the first examples have right."""
    batch = data.batch([Draw(0, i) for i in range(min(limit, len(data)))], 0)
    assert batch.targets is not None and batch.source is not None
    expected = [[token for token in row if token != IGNORED] for row in batch.targets.tolist()]
    device, lengths = model.device, batch.source_lengths
    sources = Batch(source=batch.source.to(device), source_lengths=None if lengths is None else lengths.to(device))
    training = model.training
    model.eval()
    answers = greedy_batch(cast(GenerativeModel[Any], model), sources, batch.targets.shape[1])
    model.train(training)
    pairs = list(zip(answers, expected, strict=True))
    right = [sum(a == b for a, b in zip(answer, row, strict=False)) for answer, row in pairs]
    whole = sum(n == len(row) for n, row in zip(right, expected, strict=True))
    return sum(right) / sum(map(len, expected)), whole / len(expected)
