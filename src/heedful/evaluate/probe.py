"""Which layers know best? Frozen features of a model, and on each choice of them a linear classifier of words.

Devlin et al. 2019 (section 5.3, table 7) asked it of BERT with CoNLL-2003's entities, by a two-layer LSTM on top. Here
it is a logistic regression, so that what is measured is what the features say as they are, and takes seconds: it is
fitted to all words at once by L-BFGS, on features scaled to mean 0 and variance 1, with a small weight decay.

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
from heedful.evaluate.entities import are_entities, score_entities
from heedful.models.base import Batch, EncoderDecoderModel, Model
from heedful.models.seq2seq import Seq2Seq
from heedful.models.vit import ViT
from heedful.observe.lens import FEATURES, MIN_LAYERS, combine_layers, hidden_states

# As the lecture's table has them.
ROWS = ("first", "last", "sum_all", "second_to_last", "sum_last_four", "concat_last_four")
assert set(ROWS) == set(FEATURES)
TITLES = {
    "first": "first layer (embeddings)",
    "last": "last layer",
    "sum_all": "sum of all layers",
    "second_to_last": "second-to-last layer",
    "sum_last_four": "sum of the last four",
    "concat_last_four": "concatenation of the last four",
}
DECAY = 1e-4
STEPS = 200  # of L-BFGS at most
BATCH = 32  # sentences

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Row:
    """What a classifier of one choice of layers reaches on sentences it has not seen."""

    which: str
    n_features: int
    accuracy: float  # of words
    f1: float | None  # of entities, where the tags are such
    train_accuracy: float

    @property
    def title(self) -> str:
        return TITLES.get(self.which, f"after layer {self.which}")

    @property
    def score(self) -> float:
        return self.accuracy if self.f1 is None else self.f1


def probe(
    model: Model,
    train: TaggedSentences,
    dev: TaggedSentences,
    choices: Sequence[str] | None = None,
    *,
    progress: Progress = lambda what, done, of: None,
) -> list[Row]:
    """A row for each choice of layers: a name of observe.lens.FEATURES, a layer's number, or "each" for every layer
    alone. Without choices, the lecture's table, or what a model with fewer than four layers has of it."""
    if isinstance(model, ViT):
        raise ValueError("this model reads images: words of a text can be told from what a text model makes of them")
    if train.names != dev.names:
        raise ValueError("both files must have the same tags: read the second with names=train.names")
    known, labels, _ = read(model, train, lambda done, of: progress("reading", done, of))
    tested, expected, sentences = read(model, dev, lambda done, of: progress("reading more", done, of))
    n_layers = len(known) - 1
    choices = choices or [name for name in ROWS if n_layers >= MIN_LAYERS.get(name, 0)]
    every = ["first", *map(str, range(n_layers))]
    choices = [name for choice in choices for name in (every if choice == "each" else [choice])]
    for which in choices:
        combine_layers(known[:, :1], which)  # ValueError now, not after minutes
    rows = []
    for i, which in enumerate(choices):
        progress(f"fitting {which}", i, len(choices))
        fitted = Linear.fit(combine_layers(known, which), labels, len(train.names))
        said = fitted(combine_layers(tested, which))
        f1 = None
        if are_entities(train.names):
            true = _told(expected, sentences, train.names)
            f1 = score_entities(true, _told(said, sentences, train.names)).f1
        seen = _agree(fitted(combine_layers(known, which)), labels)
        rows.append(Row(which, fitted.weight.shape[0], _agree(said, expected), f1, seen))
    progress("fitting", len(choices), len(choices))
    return rows


def _agree(said: Tensor, true: Tensor) -> float:
    return float((said == true).float().mean())


def _told(tags: Tensor, sentences: Sequence[int], names: Sequence[str]) -> list[list[str]]:
    return [[names[i] for i in part.tolist()] for part in tags.split(list(sentences))]


def spread(n: int, most: int | None) -> list[int]:
    """At most so many of n sentences, evenly spread."""
    if most is not None and most < 1:
        raise ValueError(f"{most} sentences: there must be 1 at least")
    return list(range(n)) if most is None or most >= n else [n * i // most for i in range(most)]


@torch.no_grad()
def read(
    model: Model, data: TaggedSentences, progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[Tensor, Tensor, list[int]]:
    """The embeddings by layer (L + 1, N, E) of every word, of its first piece, their tags (N,), and how many words each
    sentence has."""
    was_training = model.training
    model.eval()
    order = np.argsort(data.lengths, kind="stable").tolist()  # those of about one length together
    found: dict[int, Tensor] = {}
    for begin in range(0, len(order), BATCH):
        part = order[begin : begin + BATCH]
        batch = data.batch([Draw(0, i) for i in part], seed=0)
        layers = hidden_states(model, _for(model, batch)).cpu()
        assert batch.targets is not None
        for row, i in enumerate(part):
            found[i] = layers[:, row, : batch.targets.shape[1]][:, batch.targets[row] != IGNORED]
        progress(min(begin + BATCH, len(order)), len(order))
    model.train(was_training)
    marks = [torch.from_numpy(np.asarray(data.marks[i], dtype=np.int64)) for i in range(len(data))]
    marks = [row[row != IGNORED] for row in marks]
    words = torch.cat([found[i] for i in range(len(data))], dim=1)
    return words, torch.cat(marks), [len(row) for row in marks]


def _for(model: Model, batch: Batch) -> Batch:
    """The batch of an encoder-decoder has these as its source, and a target that does not matter."""
    tokens, lengths = batch.ids.to(model.device), batch.lengths
    lengths = None if lengths is None else lengths.to(model.device)
    if not isinstance(model, EncoderDecoderModel | Seq2Seq):
        return Batch(tokens, lengths)
    start = torch.full((len(tokens), 1), model.start_id, device=model.device)
    return Batch(start, source=tokens, source_lengths=lengths)


@dataclass(frozen=True)
class Linear:
    """softmax(x W + b), of features that are scaled first."""

    mean: Tensor
    scale: Tensor
    weight: Tensor  # (E, C)
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The likeliest tag of each row (N, E)."""
        return (((x - self.mean) * self.scale) @ self.weight + self.bias).argmax(dim=-1)

    @classmethod
    def fit(cls, x: Tensor, labels: Tensor, n_labels: int) -> Linear:
        """The minimum of the mean cross-entropy and the weight decay, which is the only one there is."""
        mean = x.mean(dim=0)
        scale = 1 / x.std(dim=0, unbiased=False).clamp(min=1e-6)
        x = (x - mean) * scale
        weight = torch.zeros(x.shape[1], n_labels, requires_grad=True)
        bias = torch.zeros(n_labels, requires_grad=True)
        search = torch.optim.LBFGS(
            [weight, bias], max_iter=STEPS, tolerance_grad=1e-5, tolerance_change=1e-7, history_size=20,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def loss() -> Tensor:
            search.zero_grad()
            found = F.cross_entropy(x @ weight + bias, labels) + DECAY / 2 * weight.square().sum()
            found.backward()
            return found

        with torch.enable_grad():
            search.step(loss)
        return cls(mean, scale, weight.detach(), bias.detach())


def table(rows: Sequence[Row], name: str = "") -> str:
    """The rows as lines of text; the best is marked."""
    kind = "accuracy" if any(row.f1 is None for row in rows) else "entity F1"
    head = f"{name or 'features':<32} {'size':>6} {kind:>10}" + ("" if kind == "accuracy" else f" {'accuracy':>9}")
    best = max(row.score for row in rows)
    lines = [head]
    for row in rows:
        line = f"{row.title:<32} {row.n_features:>6} {100 * row.score:>10.2f}"
        line += "" if row.f1 is None else f" {100 * row.accuracy:>9.2f}"
        lines.append(line + (" *" if row.score == best else ""))
    return "\n".join(lines)
