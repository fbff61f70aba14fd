"""Classification of texts, pairs of texts and images: accuracy, macro-F1, a confusion matrix, and how well the
probabilities are calibrated.

ECE, the expected calibration error (Guo et al. 2017, section 2), is the mean distance between the probability of the
predicted label and the share of such predictions that are right, over 15 bins of equal width.

    N items, C labels
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from heedful.data.classification import read_labelled
from heedful.data.images import ImageSet, read_images
from heedful.evaluate.bootstrap import Metric, mean_metric
from heedful.evaluate.entities import f1_of
from heedful.evaluate.task import Item, LoadedModel, Record, Task
from heedful.models.vit import ViT
from heedful.tasks.classify import Label, classify_images

BINS = 15


@dataclass(frozen=True)
class Classification(Task):
    """Accuracy, macro-F1, ECE and the confusion matrix of a classifier."""

    about: ClassVar[str] = "accuracy, macro-F1, calibration (ECE) and confusion matrix of labels"
    reads: ClassVar[str] = "a .tsv, .csv or .jsonl of texts and labels; for a vision model a folder of images for each "
    reads += "class, or an idx file (MNIST's) with its labels beside it"
    batch_size: ClassVar[int] = 64

    text: str | int | None = None  # column of the text, by name or from 0
    second: str | int | None = None  # of the second text of a pair
    label: str | int | None = None  # of the label

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must choose one of several labels."""
        loaded.require("classify")
        problem = getattr(loaded.model.config, "problem", None)
        if problem in ("regression", "multi_label_classification"):
            raise ValueError(f"{loaded.name} has a head for {problem}, and this measures the choice of one label")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """Texts, pairs or images with the name of their label as the model has it."""
        names = label_names(loaded)
        if isinstance(loaded.model, ViT):
            return _image_items(loaded.model, names, paths[0])
        texts, seconds, labels, _ = read_labelled(paths[0], self.text, self.second, self.label)
        right = match_labels([str(label).strip() for label in labels], names, str(paths[0]))
        inputs = texts if seconds is None else list(zip(texts, seconds, strict=True))
        shown = texts if seconds is None else [f"{a}\t{b}" for a, b in zip(texts, seconds, strict=True)]
        return [Item(str(i), *found) for i, found in enumerate(zip(inputs, right, shown, strict=True))]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The likeliest label and its probability; an item's score is 1 if it is right."""
        found: list[list[Label]]
        if isinstance(loaded.model, ViT):
            found = classify_images(loaded.model, torch.stack([item.input for item in items]))
        elif isinstance(items[0].input, tuple):
            found = loaded.classify([item.input[0] for item in items], [item.input[1] for item in items])
        else:
            found = loaded.classify([item.input for item in items])
        return [
            {
                "prediction": labels[0].name,
                "score": int(labels[0].name == item.reference),
                "probability": labels[0].score,
            }
            for item, labels in zip(items, found, strict=True)
        ]

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """Accuracy, macro-F1 over the labels that occur, ECE."""
        names, true, said = _label_indices(records)
        one_hot = np.eye(len(names))
        counts_of = np.stack([one_hot[true], one_hot[said], one_hot[true] * one_hot[said]], axis=-1)  # (N, C, 3)
        right = (true == said).astype(float)
        return [
            mean_metric("accuracy", right.tolist()),
            Metric("macro-F1", lambda counts: 100 * _macro_f1(counts, counts_of)),
            Metric("ECE", calibration_error([r["probability"] for r in records], right), higher_is_better=False),
        ]

    def details(self, records: Sequence[Record]) -> dict[str, Any]:
        """The confusion matrix: a row for each true label, a column for each predicted one."""
        names, true, said = _label_indices(records)
        matrix = np.zeros((len(names), len(names)), dtype=int)
        np.add.at(matrix, (true, said), 1)
        return {"labels": names, "confusion": matrix.tolist()}


def calibration_error(probabilities: Sequence[float], right: np.ndarray) -> Any:
    """The ECE in percent as a function of counts (R, N)."""
    p = np.asarray(probabilities, dtype=float)
    bins = np.eye(BINS)[np.clip(np.ceil(p * BINS).astype(int) - 1, 0, BINS - 1)]  # (N, BINS), (0, 1/15] first

    def values(counts: np.ndarray) -> np.ndarray:
        gap = counts @ (bins * (right - p)[:, None])  # (R, BINS)
        return 100 * np.abs(gap).sum(axis=1) / counts.sum(axis=1)

    return values


def _macro_f1(counts: np.ndarray, counts_of: np.ndarray) -> np.ndarray:
    """The mean of the labels' F1 (R,); a label that a resample has neither true nor predicted is left out."""
    n, c, _ = counts_of.shape
    sums = (counts @ counts_of.reshape(n, c * 3)).reshape(-1, c, 3)
    f1 = f1_of(sums.reshape(-1, 3)).reshape(-1, c)
    return f1.sum(axis=1) / np.maximum((sums.sum(axis=2) > 0).sum(axis=1), 1)


def _label_indices(records: Sequence[Record]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The labels that occur, and the index of the true and of the predicted label of each record."""
    names = sorted({r[key] for r in records for key in ("reference", "prediction")})
    number = {name: i for i, name in enumerate(names)}
    true, said = (np.array([number[r[key]] for r in records]) for key in ("reference", "prediction"))
    return names, true, said


def label_names(loaded: LoadedModel) -> list[str]:
    """The names of a classifier's labels, numbers if it has none."""
    config = loaded.model.config
    return list(config.labels or [str(i) for i in range(config.n_labels)])


def match_labels(given: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """The model's name for each label of the data: the same, whatever the case; else its number, from 0."""
    folded = {name.casefold(): name for name in names}
    if all(label.casefold() in folded for label in given):
        return [folded[label.casefold()] for label in given]
    if all(label.isdecimal() and int(label) < len(names) for label in given):
        return [names[int(label)] for label in given]
    other = next(label for label in given if label.casefold() not in folded)
    raise ValueError(f"{where}: the label {other!r} is none of the model's: {', '.join(names[:20])}")


def _image_items(model: ViT, names: list[str], path: Path) -> list[Item]:
    images: ImageSet = read_images(path, size=model.config.image_size if path.is_dir() else None)
    if images.labels is None:
        raise ValueError(f"{path} has no labels: they are in an idx file beside it, or classes are folders of images")
    right = match_labels([images.names[i] for i in images.labels], names, str(path))
    pixels = images.pixels
    if pixels.shape[1] != model.config.n_channels and model.config.n_channels == 1:
        pixels = np.round(pixels.mean(axis=1, keepdims=True)).astype(np.uint8)
        images = ImageSet(pixels, images.labels, images.names, images.top)
    scaled = images.scaled(slice(None))
    return [
        Item(str(i), scaled[i], name, hashlib.blake2b(pixels[i].tobytes(), digest_size=8).hexdigest())
        for i, name in enumerate(right)
    ]
