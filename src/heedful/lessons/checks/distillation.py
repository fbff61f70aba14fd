"""The exercises of the lesson on distillation: soft targets, and the angle of hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from heedful.lessons.checking import require, require_close, require_tensor


def check_soft_loss(answer: Callable[..., Any]) -> None:
    """T² KL(teacher ‖ student), the mean over positions."""
    generator = torch.Generator().manual_seed(21)
    student, teacher = 2 * torch.randn(2, 5, 12, generator=generator)
    temperature = 3.0

    def divergence(of: torch.Tensor, against: torch.Tensor, t: float, other_t: float) -> torch.Tensor:
        p, q = (of / t).log_softmax(dim=-1), (against / other_t).log_softmax(dim=-1)
        return (p.exp() * (p - q)).sum(dim=-1).mean()

    expected = temperature**2 * divergence(teacher, student, temperature, temperature)
    made = require_tensor(answer(student.clone(), teacher.clone(), temperature), ())

    def near(other: torch.Tensor) -> bool:
        return bool((made - other).abs() < 1e-4)

    require(not near(expected / temperature**2), "the factor T² is missing")
    require(not near(expected * len(student)), "that is the sum over the positions: take the mean")
    require(not near(expected / 12), "the divergence is a sum over the vocabulary, and a mean over positions only")
    reverse = temperature**2 * divergence(student, teacher, temperature, temperature)
    require(not near(reverse), "that is KL(student ‖ teacher): the probabilities in front are the teacher's")
    one_sided = [temperature**2 * divergence(teacher, student, *t) for t in ((1.0, temperature), (temperature, 1.0))]
    require(not any(map(near, one_sided)), "both logits are divided by the temperature, not one of them")
    cold = temperature**2 * divergence(teacher, student, 1.0, 1.0)
    require(not near(cold), "the logits are not divided by the temperature")
    soft = F.cross_entropy(student / temperature, (teacher / temperature).softmax(dim=-1)) * temperature**2
    require(not near(soft), "that is the cross-entropy: subtract the teacher's entropy, so that equal logits cost 0")
    require_close(made, expected, "it is not T² times the sum of p (ln p - ln q), the mean over positions")
    require_close(answer(teacher.clone(), teacher.clone(), 2.0), torch.tensor(0.0), "equal logits have no loss", 1e-5)


def check_cosine_loss(answer: Callable[..., Any]) -> None:
    """The mean of 1 - cos over positions."""
    generator = torch.Generator().manual_seed(22)
    mine, theirs = torch.randn(2, 3, 4, 8, generator=generator)
    cosines = F.cosine_similarity(mine, theirs, dim=-1)  # (B, T)
    made = require_tensor(answer(mine.clone(), theirs.clone()), ())

    def near(other: torch.Tensor) -> bool:
        return bool((made - other).abs() < 1e-4)

    require(not near(cosines.mean()), "that is the cosine itself: the loss is 1 minus it, 0 for the same direction")
    require(not near((1 - cosines).sum()), "that is the sum over the positions: take the mean")
    whole = 1 - F.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0)
    require(not near(whole), "that is one angle of everything flattened: each position has its own")
    require(not near(1 - (mine * theirs).sum(dim=-1).mean()), "divide the product by the two lengths")
    over_time = 1 - F.cosine_similarity(mine, theirs, dim=1).mean()
    require(not near(over_time), "the angle is between vectors of the last dimension, the features")
    require_close(made, 1 - cosines.mean(), "it is not the mean over positions of 1 - cos")
    require_close(
        answer(mine, 5 * mine), torch.tensor(0.0), "a longer vector of the same direction costs nothing", 1e-5
    )
