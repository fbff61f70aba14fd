"""Temperature scaling (Guo et al. 2017, section 4.2): a classifier's logits divided by one number, chosen so that its
probabilities fit data that it was not trained on. Which label is the likeliest does not change.

    N items, C labels
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from heedful.evaluate.classification import Classification, label_names
from heedful.evaluate.task import LoadedModel
from heedful.models.heads import SequenceHead
from heedful.tasks.classify import classify_images, classify_texts

LOWEST, HIGHEST = 0.05, 20.0
LEAST = 1e-12  # a probability that is 0 in float32


def fit_temperature(probabilities: Tensor, right: Tensor) -> float:
    """The temperature by which softmax(log p / temperature) has the lowest cross-entropy; p (N, C), labels (N,)."""
    logits = probabilities.double().clamp_min(LEAST).log()
    chosen = torch.nn.functional.one_hot(right, logits.shape[1]).to(logits)

    def slope(inverse: float) -> float:
        """The derivative of the cross-entropy by 1/temperature, in which it is convex."""
        expected = (logits * inverse).softmax(dim=1)
        return float(((expected - chosen) * logits).sum())

    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return 1 / (low * high) ** 0.5


def calibrate(loaded: LoadedModel, path: str | Path) -> float:
    """Scale the weights of a classifier's last layer by the temperature that fits labelled data; the temperature."""
    task = Classification().resolved(loaded)
    items = task.items(loaded, [Path(path)])
    head = getattr(loaded.model, "head", None)
    if not isinstance(head, SequenceHead):
        raise ValueError(f"{loaded.name} has no classifier whose temperature could be set")
    names = label_names(loaded)
    inputs = [item.input for item in items]
    if isinstance(inputs[0], Tensor):
        found = classify_images(loaded.model, torch.stack(inputs))
    else:
        assert loaded.tokenizer is not None, "the ability promises one"
        pairs = isinstance(inputs[0], tuple)
        first, second = zip(*inputs, strict=True) if pairs else (inputs, None)
        found = classify_texts(loaded.model, loaded.tokenizer, first, second)
    rows = [{label.name: label.score for label in labels} for labels in found]
    temperature = fit_temperature(
        torch.tensor([[row[name] for name in names] for row in rows]),
        torch.tensor([names.index(item.reference) for item in items]),
    )
    with torch.no_grad():
        for p in head.classifier.parameters():
            p.div_(temperature)
    return temperature
