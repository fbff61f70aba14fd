"""What a model is trained towards: each objective turns a model and a batch into a sum of losses and their number.

Sums are divided once, by the number of targets of the whole (global) batch, so that accumulating gradients over small
batches equals one large batch.

    B batch, T positions, V vocabulary, C labels
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.models.base import Batch, Model

IGNORED = -100  # a target that does not count


@dataclass
class Loss:
    sum: Tensor
    n_targets: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        return self.sum / max(self.n_targets, 1)


class Objective(Protocol):
    def __call__(self, model: Model, batch: Batch) -> Loss: ...


def causal(model: Model, batch: Batch) -> Loss:
    """Each token from those before it; padding and the step from one packed document to the next do not count."""
    targets = batch.targets if batch.targets is not None else next_tokens(batch)
    return cross_entropy(model(batch).logits, targets)


def next_tokens(batch: Batch) -> Tensor:
    """Targets (B, T) of a causal model: the tokens one place to the left."""
    tokens = batch.ids
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    if batch.lengths is not None:
        place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        targets[place >= batch.lengths[:, None]] = IGNORED
    if batch.documents is not None:
        targets[:, :-1][batch.documents[:, 1:] != batch.documents[:, :-1]] = IGNORED
    return targets


def seq2seq(model: Model, batch: Batch, *, smoothing: float = 0.0) -> Loss:
    """Each target token from the source and the target tokens before it (Vaswani et al. 2017, section 5.4)."""
    return cross_entropy(model(batch).logits, wanted(batch), smoothing)


def masked(model: Model, batch: Batch) -> Loss:
    """The hidden tokens of BERT's masked language model, and whether B follows A where the batch says it."""
    output = model(batch)
    loss = cross_entropy(output.logits, wanted(batch))
    if batch.next_sentence is not None:
        # The paper adds the two means; the mean over tokens stays the mean when n_targets is theirs.
        pair = F.cross_entropy(output.extra["next_sentence"].float(), batch.next_sentence)
        loss.sum = loss.sum + pair * loss.n_targets
        loss.metrics["next_sentence_loss"] = pair.item()
    return loss


def classify(model: Model, batch: Batch) -> Loss:
    """One label per sequence or image (B,), or per token (B, T)."""
    return cross_entropy(model(batch).logits, wanted(batch))


def multi_label(model: Model, batch: Batch) -> Loss:
    """Any number of labels per sequence: targets (B, C) of 0 and 1, each a question of its own."""
    logits, targets = model(batch).logits, wanted(batch)
    total = F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="sum")
    return Loss(total, targets.numel())


def regress(model: Model, batch: Batch) -> Loss:
    """One number per sequence (B,), or several (B, C): the squared error."""
    logits = model(batch).logits
    total = F.mse_loss(logits.float(), wanted(batch).float().view_as(logits), reduction="sum")
    return Loss(total, logits.numel())


def answer(model: Model, batch: Batch) -> Loss:
    """The first and the last token of the answer (B, 2), each a choice among the positions (BERT, section 4.2)."""
    logits, targets = model(batch).logits, wanted(batch)  # (B, T, 2)
    if batch.lengths is not None:
        hidden = torch.arange(logits.shape[1], device=logits.device) >= batch.lengths[:, None]
        logits = logits.masked_fill(hidden[..., None], -torch.inf)
    loss = cross_entropy(logits.transpose(1, 2), targets)  # over positions
    return loss


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Loss:
    """Summed over all targets that count; logits (..., V), targets (...)."""
    total = F.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return Loss(total, int((targets != IGNORED).sum()))


def wanted(batch: Batch) -> Tensor:
    if batch.targets is None:
        raise ValueError("this objective compares with the batch's targets, and it has none")
    return batch.targets
