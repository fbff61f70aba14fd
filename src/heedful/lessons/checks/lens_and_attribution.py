"""The exercises of *The lens and attribution*."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_lens_logits(answer: Callable[..., Tensor]) -> None:
    """An RMS norm with its gain, then the table."""
    stream, gain, table, eps = 3 * torch.randn(4, 6) + 1, torch.rand(6) + 0.5, torch.randn(9, 6), 0.5
    squares, centred = stream.square(), stream - stream.mean(dim=-1, keepdim=True)

    def logits(squares: Tensor, x: Tensor = stream, scale: Tensor | float = gain) -> Tensor:
        return x / squares.sqrt() * scale @ table.T

    right = logits(squares.mean(dim=-1, keepdim=True) + eps)
    got = require_tensor(answer(stream, gain, table, eps), (4, 9))
    wrong = {
        "the norm is missing": stream @ table.T,
        "the norm's gain is missing": logits(squares.mean(dim=-1, keepdim=True) + eps, scale=1.0),
        "eps is missing under the root": logits(squares.mean(dim=-1, keepdim=True)),
        "it divides by the length of the vector: the mean of the squares is asked for, not their sum": logits(
            squares.sum(dim=-1, keepdim=True) + eps
        ),
        "it subtracts the mean, as layer norm does: RMS norm does not": logits(
            centred.square().mean(dim=-1, keepdim=True) + eps, x=centred
        ),
        "the mean runs over the layers: each vector has its own": logits(squares.mean(dim=0, keepdim=True) + eps),
        "these are probabilities: logits are asked for": right.softmax(dim=-1),
    }
    for message, values in wrong.items():
        require(not torch.allclose(got, values, atol=1e-4), message)
    require_close(got, right, "a logit is wrong")


def check_direct_attribution(answer: Callable[..., Tensor]) -> None:
    """One divisor for all parts, so that they add up to the logit."""
    parts, gain, direction = torch.randn(5, 6), torch.rand(6) + 0.5, torch.randn(6)
    stream = parts.sum(dim=0)
    root = (stream.square().mean() + 0.5).sqrt()
    total = (stream / root * gain) @ direction
    got = answer(parts, gain, direction, 0.5)
    require(not (isinstance(got, Tensor) and got.ndim == 0), "it returns the sum: a number for each part is asked for")
    got = require_tensor(got, (5,))
    own = parts / (parts.square().mean(dim=-1, keepdim=True) + 0.5).sqrt() * gain @ direction
    wrong = {
        "each part is divided by its own root mean square: the divisor is that of the whole stream": own,
        "the division by the root mean square is missing": parts * gain @ direction,
        "the norm's gain is missing": parts / root @ direction,
    }
    for message, values in wrong.items():
        require(not torch.allclose(got, values, atol=1e-4), message)
    require_close(got.sum(), total, "the contributions do not sum to direction · RMSNorm(stream)")
    require_close(got, parts * gain / root @ direction, "a contribution is wrong")


def check_integrated_gradients(answer: Callable[..., Tensor]) -> None:
    """Completeness on functions that are curved and saturated."""

    def relu_step(x: Tensor) -> Tensor:
        return (1 - (1 - x).relu()).sum()

    two = torch.tensor([2.0])
    got = require_tensor(answer(relu_step, two, torch.zeros(1), 64), (1,))
    require(
        float(got.abs()) > 1e-3,
        "for 1 - relu(1 - x) from 0 to 2 it gives 0, the gradient at the end: take those along the way",
    )
    require_close(got, torch.ones(1), "for 1 - relu(1 - x) from 0 to 2 the attribution is 1", 1e-3)

    def cubes(x: Tensor) -> Tensor:
        return (x**3).sum() + (x[0] * x[1]).sum()

    x, baseline = torch.randn(2, 3) + 2, torch.randn(2, 3)
    with torch.no_grad():
        change = cubes(x) - cubes(baseline)
    got = require_tensor(answer(cubes, x, baseline, 50), (2, 3))
    _not_another_rule(got, cubes, x, baseline)
    require_close(got.sum(), change, "the attributions do not sum to f(x) - f(baseline)", 1e-2)
    swapped = baseline.flip(0)
    exact = x**3 - baseline**3 + (x - baseline) * (x.flip(0) + swapped) / 2  # the integral of 3 p² + the other factor
    require_close(got, exact, "an attribution is wrong", 1e-2)


def _not_another_rule(got: Tensor, f: Callable[[Tensor], Any], x: Tensor, baseline: Tensor) -> None:
    """What is often computed in place of integrated gradients, or a part of them."""

    def mean_gradient(low: Tensor) -> Tensor:
        points = [(low + (k + 0.5) / 50 * (x - low)).requires_grad_() for k in range(50)]
        return torch.stack([torch.autograd.grad(f(point), point)[0] for point in points]).mean(dim=0)

    mean, way = mean_gradient(baseline), x - baseline
    wrong = {
        "it is the mean gradient: multiply by x - baseline": mean,
        "it multiplies by x: the way is x - baseline": x * mean,
        "it is 50 times too large: the mean of the gradients is asked for, not their sum": 50 * way * mean,
        "the way begins at 0: it must begin at the baseline": x * mean_gradient(torch.zeros_like(x)),
        "the sign is wrong: x - baseline": -way * mean,
    }
    for message, values in wrong.items():
        require(not torch.allclose(got, values, rtol=1e-3, atol=1e-3), message)
