"""The exercises of *Residuals and norms*."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from heedful.lessons.checking import require, require_close, require_tensor


def check_layer_norm(answer: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
    """Axis, variance, eps, weight and bias."""
    x, weight, bias, eps = 3 * torch.randn(4, 5, 6) + 2, torch.rand(6) + 0.5, torch.randn(6), 1e-5
    got = require_tensor(answer(x, weight, bias, eps), (4, 5, 6))

    def normed(axes: tuple[int, ...], unbiased: bool = False) -> Tensor:
        spread = x.var(dim=axes, keepdim=True, unbiased=unbiased)
        return (x - x.mean(dim=axes, keepdim=True)) / torch.sqrt(spread + eps)

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-3)

    right = normed((-1,))
    require(not same(right), "weight and bias are not used")
    require(not same(right * weight), "the bias is not added")
    require(not same(right + bias), "it is not multiplied by the weight")
    for axes, what in {(0,): "the batch", (1,): "the words of a sentence", (1, 2): "a whole sentence"}.items():
        over = f"mean and variance are taken over {what}: they must be taken over the numbers of each word"
        require(not same(normed(axes) * weight + bias), over)
    n_1 = same(normed((-1,), unbiased=True) * weight + bias)
    require(not n_1, "the variance is divided by d - 1 (torch's default): it must be d, with unbiased=False")
    by_variance = (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, keepdim=True, unbiased=False) + eps)
    require(not same(by_variance * weight + bias), "it divides by the variance, not by its square root")
    rms = x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps)
    require(not same(rms * weight + bias), "the mean is not subtracted: that is RMSNorm")
    require_close(got, right * weight + bias, "a number is wrong")
    same_numbers = answer(torch.ones(1, 1, 6), weight, bias, eps)
    require(bool(torch.isfinite(same_numbers).all()), "a word whose numbers are all the same gives NaN: where is eps?")
    small = answer(1e-3 * x, weight, bias, eps)
    with_eps = nn.functional.layer_norm(1e-3 * x, (6,), weight, bias, eps)
    require_close(small, with_eps, "eps must be added to the variance, under the square root", 1e-3)


def check_pre_norm_step(answer: Callable[..., Tensor]) -> None:
    """The norm before the sublayer, and the skip around both."""
    norm, sublayer = nn.LayerNorm(6), nn.Linear(6, 6)
    x = 5 * torch.randn(2, 3, 6) + 1
    with torch.no_grad():
        got = require_tensor(answer(x, sublayer, norm), (2, 3, 6))
        mistakes = {
            "there is no skip: x itself must be added": sublayer(norm(x)),
            "this is post-norm: the norm must stand before the sublayer": norm(x + sublayer(x)),
            "the sublayer reads x itself: it must read norm(x)": x + sublayer(x),
            "the norm is after the sublayer: it must stand before it": x + norm(sublayer(x)),
            "the skip carries norm(x): it must carry x itself, or the stream is lost": norm(x) + sublayer(norm(x)),
        }
        for message, wrong in mistakes.items():
            require(not torch.allclose(got, wrong, atol=1e-4), message)
        require_close(got, x + sublayer(norm(x)), "a number is wrong")
