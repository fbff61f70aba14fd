"""Distillation of a fine-tuned encoder: a smaller one learns its labels (Hinton et al. 2015; DistilBERT, section 3).

The three losses of `heedful.train.distill`, over what the head chooses among:

    classify    the labels of a sequence           answer    the positions of an answer's first and last token
    tag         the labels of each word

    soft    KL(teacher ‖ student) at the temperature, times its square      hard    cross-entropy of the true label
    cosine  1 - cos of the angle between their last hidden states, the mean over the tokens of a sequence

All are per target, so the sum does not depend on how a batch is cut.

    B batch, T positions, E model width, C labels
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.data.dataset import IGNORED
from heedful.models.base import Batch, Model, Output
from heedful.models.config import PROBLEMS
from heedful.models.encoder import EncoderModel
from heedful.models.heads import ChoiceHead, NextSentenceHead, SequenceHead, SpanHead, TokenHead
from heedful.train.distill import check_sizes
from heedful.train.loss import Loss, cross_entropy
from heedful.train.objectives import accuracy, required_targets

IMPOSSIBLE = -1e4  # the logit of padding: finite, so that 0 x log 0 is 0


def has_labels(model: Model) -> bool:
    """Whether the model chooses one of several labels for a sequence or a token, or the places of an answer."""
    if not isinstance(model, EncoderModel) or isinstance(model.head, ChoiceHead | NextSentenceHead):
        return False
    if isinstance(model.head, SpanHead):
        return True
    return isinstance(model.head, SequenceHead | TokenHead) and model.config.problem == PROBLEMS[0]


class DistillLabels:
    """The distillation objective of classifiers, taggers and readers."""

    def __init__(
        self, teacher: Model, *, temperature: float = 2.0, soft: float = 5.0, hard: float = 2.0, cosine: float = 1.0
    ) -> None:
        if not has_labels(teacher):
            raise ValueError(f"a {type(teacher).__name__} without one label among several cannot teach labels")
        self.teacher = teacher.eval().requires_grad_(False)
        self.temperature, self.soft, self.hard, self.cosine = temperature, soft, hard, cosine

    def __call__(self, model: Model, batch: Batch) -> Loss:
        """The weighted sum of the three losses over a batch."""
        self._check(model)
        given = required_targets(batch)
        mine, theirs = model(batch), self._teacher_output(batch)
        logits, taught = _choices(model, mine, batch), _choices(self.teacher, theirs, batch)  # (..., C)
        counted = given != IGNORED
        n = counted.sum()
        t = self.temperature
        apart = F.kl_div(
            (logits / t).log_softmax(dim=-1), (taught / t).log_softmax(dim=-1), reduction="none", log_target=True
        ).sum(dim=-1)
        soft = t**2 * torch.where(counted, apart, 0.0).sum()
        hard = cross_entropy(logits, given).sum
        metrics: dict[str, tuple[Tensor, Tensor | int]] = {
            "soft_loss": (soft.detach(), n),
            "hard_loss": (hard.detach(), n),
            "accuracy": accuracy(logits, given),
        }
        total = self.soft * soft + self.hard * hard
        if self.cosine:
            angles = (
                _angles(mine.hidden, theirs.hidden, batch.lengths) * counted.reshape(len(counted), -1).sum(1)
            ).sum()
            metrics["cosine_loss"] = (angles.detach(), n)
            total = total + self.cosine * angles
        return Loss(total, n, metrics)

    @torch.no_grad()
    def _teacher_output(self, batch: Batch) -> Output:
        self.teacher.to(batch.ids.device)
        if isinstance(self.teacher, EncoderModel) and self.teacher.segment is None:
            batch = dataclasses.replace(batch, segments=None)
        found: Output = self.teacher(batch)
        return found

    def _check(self, model: Model) -> None:
        mine, theirs = model.config, self.teacher.config
        if not has_labels(model) or mine.head != theirs.head:
            raise ValueError(
                f"a {type(model).__name__} cannot learn from this {type(self.teacher).__name__}: both need a head "
                f"of the kind {theirs.head}"
            )
        if mine.n_labels != theirs.n_labels:
            raise ValueError(f"the student has {mine.n_labels} labels and the teacher {theirs.n_labels}")
        check_sizes(model, self.teacher, cosine=self.cosine > 0)


def _choices(model: Model, output: Output, batch: Batch) -> Tensor:
    """The logits (..., C) that a softmax goes over: of labels, or for an answer (B, 2, T) of positions."""
    assert output.logits is not None, "has_labels promises a head"
    logits = output.logits.float()
    if not isinstance(model.get_submodule("head"), SpanHead):
        return logits
    if batch.lengths is not None:
        padding = torch.arange(logits.shape[1], device=logits.device) >= batch.lengths[:, None]
        logits = logits.masked_fill(padding[..., None], IMPOSSIBLE)
    return logits.transpose(1, 2)


def _angles(mine: Tensor, theirs: Tensor, lengths: Tensor | None) -> Tensor:
    """1 - cos of hidden states (B, T, E), the mean over each sequence's tokens (B,)."""
    apart = 1 - F.cosine_similarity(mine.float(), theirs.float(), dim=-1)  # (B, T)
    if lengths is None:
        return apart.mean(dim=1)
    real = torch.arange(apart.shape[1], device=apart.device) < lengths[:, None]
    return torch.where(real, apart, 0.0).sum(dim=1) / lengths
