"""Linear probes: how well a logistic regression on frozen hidden states of each layer tags words.

Devlin et al. 2019 (section 5.3, table 7) did it for BERT on CoNLL-2003's entities with a two-layer LSTM on top. A
linear classifier measures what the features contain as they are, in seconds. It is fitted to all words at once by
L-BFGS, on features scaled to mean 0 and variance 1, with a small weight decay.

    N words, L layers, E width, C tags
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.data.dataset import IGNORED, Draw
from heedful.data.tagging import TaggedSentences
from heedful.evaluate.entities import are_entity_tags, score_entities
from heedful.models.base import Batch, EncoderDecoderModel, Model
from heedful.models.seq2seq import Seq2Seq
from heedful.models.vit import ViT
from heedful.observe.lens import FEATURES, MIN_LAYERS, combine_layers, hidden_states

# The rows of BERT's table, in its order.
COMBINATIONS = ("first", "last", "sum_all", "second_to_last", "sum_last_four", "concat_last_four")
assert set(COMBINATIONS) == set(FEATURES)
TITLES = {
    "first": "first layer (embeddings)",
    "last": "last layer",
    "sum_all": "sum of all layers",
    "second_to_last": "second-to-last layer",
    "sum_last_four": "sum of the last four",
    "concat_last_four": "concatenation of the last four",
}
WEIGHT_DECAY = 1e-4
MAX_STEPS = 200  # of L-BFGS at most
BATCH = 32  # sentences

Progress = Callable[[str, int, int], None]  # description, done, total


@dataclass(frozen=True)
class ProbeResult:
    """The scores of a probe of one combination of layers, on the held-out sentences."""

    which: str
    n_features: int
    accuracy: float  # of words
    f1: float | None  # of entities, where the tags are such
    train_accuracy: float

    @property
    def title(self) -> str:
        """The name of the combination, for a table."""
        return TITLES.get(self.which, f"after layer {self.which}")

    @property
    def score(self) -> float:
        """Entity F1 where the tags are entities, else accuracy."""
        return self.accuracy if self.f1 is None else self.f1


def probe(
    model: Model,
    train: TaggedSentences,
    dev: TaggedSentences,
    choices: Sequence[str] | None = None,
    *,
    progress: Progress = lambda what, done, of: None,
) -> list[ProbeResult]:
    """Fit and score a probe for each choice of layers: a name of observe.lens.FEATURES, a layer's number, or "each" for
    every layer alone. Without choices, the rows of BERT's table that the model has enough layers for."""
    if isinstance(model, ViT):
        raise ValueError("this model reads images: probe_images is for it")
    if train.names != dev.names:
        raise ValueError("both files must have the same tags: read the second with names=train.names")
    known, labels, _ = word_features(model, train, lambda done, of: progress("reading", done, of))
    tested, expected, sentences = word_features(model, dev, lambda done, of: progress("reading more", done, of))
    n_layers = len(known) - 1
    choices = choices or [name for name in COMBINATIONS if n_layers >= MIN_LAYERS.get(name, 0)]
    every = ["first", *map(str, range(n_layers))]
    choices = [name for choice in choices for name in (every if choice == "each" else [choice])]
    for which in choices:
        combine_layers(known[:, :1], which)  # ValueError now, not after minutes
    rows = []
    for i, which in enumerate(choices):
        progress(f"fitting {which}", i, len(choices))
        fitted = LinearProbe.fit(combine_layers(known, which), labels, len(train.names))
        predicted = fitted(combine_layers(tested, which))
        f1 = None
        if are_entity_tags(train.names):
            true = _tags_by_sentence(expected, sentences, train.names)
            f1 = score_entities(true, _tags_by_sentence(predicted, sentences, train.names)).f1
        train_accuracy = _accuracy(fitted(combine_layers(known, which)), labels)
        accuracy = _accuracy(predicted, expected)
        rows.append(ProbeResult(which, fitted.weight.shape[0], accuracy, f1, train_accuracy))
    progress("fitting", len(choices), len(choices))
    return rows


def _accuracy(predicted: Tensor, true: Tensor) -> float:
    return float((predicted == true).float().mean())


def _tags_by_sentence(tags: Tensor, sentences: Sequence[int], names: Sequence[str]) -> list[list[str]]:
    return [[names[i] for i in part.tolist()] for part in tags.split(list(sentences))]


def evenly_spaced(n: int, most: int | None) -> list[int]:
    """At most `most` indices of n sentences, evenly spaced."""
    if most is not None and most < 1:
        raise ValueError(f"{most} sentences: there must be 1 at least")
    return list(range(n)) if most is None or most >= n else [n * i // most for i in range(most)]


@torch.no_grad()
def word_features(
    model: Model, data: TaggedSentences, progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[Tensor, Tensor, list[int]]:
    """The hidden states by layer of every word's first token (L + 1, N, E), the tags (N,), and the number of words of
    each sentence."""
    was_training = model.training
    model.eval()
    order = np.argsort(data.lengths, kind="stable").tolist()  # to pad little
    found: dict[int, Tensor] = {}
    for begin in range(0, len(order), BATCH):
        part = order[begin : begin + BATCH]
        batch = data.batch([Draw(0, i) for i in part], seed=0)
        layers = hidden_states(model, _model_batch(model, batch)).cpu()
        assert batch.targets is not None
        for row, i in enumerate(part):
            found[i] = layers[:, row, : batch.targets.shape[1]][:, batch.targets[row] != IGNORED]
        progress(min(begin + BATCH, len(order)), len(order))
    model.train(was_training)
    marks = [torch.from_numpy(np.asarray(data.marks[i], dtype=np.int64)) for i in range(len(data))]
    marks = [row[row != IGNORED] for row in marks]
    words = torch.cat([found[i] for i in range(len(data))], dim=1)
    return words, torch.cat(marks), [len(row) for row in marks]


def _model_batch(model: Model, batch: Batch) -> Batch:
    """The batch on the model's device; of an encoder-decoder, as its source with a dummy target."""
    tokens, lengths = batch.ids.to(model.device), batch.lengths
    lengths = None if lengths is None else lengths.to(model.device)
    if not isinstance(model, EncoderDecoderModel | Seq2Seq):
        return Batch(tokens, lengths)
    start = torch.full((len(tokens), 1), model.start_id, device=model.device)
    return Batch(start, source=tokens, source_lengths=lengths)


@dataclass(frozen=True)
class LinearProbe:
    """Logistic regression on standardized features: argmax of x W + b."""

    mean: Tensor
    scale: Tensor
    weight: Tensor  # (E, C)
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The likeliest tag of each row (N, E)."""
        return (((x - self.mean) * self.scale) @ self.weight + self.bias).argmax(dim=-1)

    @classmethod
    def fit(cls, x: Tensor, labels: Tensor, n_labels: int) -> LinearProbe:
        """Minimize mean cross-entropy plus weight decay; it is convex, so the minimum is unique."""
        mean = x.mean(dim=0)
        scale = 1 / x.std(dim=0, unbiased=False).clamp(min=1e-6)
        x = (x - mean) * scale
        weight = torch.zeros(x.shape[1], n_labels, requires_grad=True)
        bias = torch.zeros(n_labels, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=MAX_STEPS, tolerance_grad=1e-5, tolerance_change=1e-7, history_size=20,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(x @ weight + bias, labels) + WEIGHT_DECAY / 2 * weight.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        return cls(mean, scale, weight.detach(), bias.detach())


def format_results(rows: Sequence[ProbeResult], name: str = "") -> str:
    """The results as a table of text; the best is marked."""
    kind = "accuracy" if any(row.f1 is None for row in rows) else "entity F1"
    head = f"{name or 'features':<32} {'size':>6} {kind:>10}" + ("" if kind == "accuracy" else f" {'accuracy':>9}")
    best = max(row.score for row in rows)
    lines = [head]
    for row in rows:
        line = f"{row.title:<32} {row.n_features:>6} {100 * row.score:>10.2f}"
        line += "" if row.f1 is None else f" {100 * row.accuracy:>9.2f}"
        lines.append(line + (" *" if row.score == best else ""))
    return "\n".join(lines)
