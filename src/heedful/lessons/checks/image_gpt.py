"""The exercises of *Image GPT*."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor


def check_k_means_step(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Means of the right pixels, on the right axis; a centre without pixels stays."""
    pixels = torch.rand(60, 3)
    centres = torch.cat([torch.rand(4, 3), torch.full((1, 3), 9.0)])  # the last is too far away for any pixel
    before = centres.clone()
    nearest = torch.cdist(pixels, centres).argmin(dim=1)
    expected = centres.clone()
    for k in nearest.unique():
        expected[k] = pixels[nearest == k].mean(dim=0)
    got = answer(pixels, centres)
    require(torch.equal(centres, before), "it changed the centres that it was given: work on a copy (clone)")
    require(
        not (isinstance(got, Tensor) and bool(got.isnan().any())),
        "there are NaNs: the mean of no pixels is 0 / 0. A centre without pixels stays where it is",
    )
    got = require_tensor(got, (5, 3))
    require(not torch.equal(got, centres), "no centre has moved")
    require(bool((got[4] == 9).all()), "a centre to which no pixel is nearest has moved: it must stay")
    everything = torch.allclose(got[0], pixels.mean(dim=0), atol=1e-5)
    require(not everything, "a centre is the mean of all pixels: take only those to which it is the nearest")
    one = bool((torch.cdist(got[:4], pixels).min(dim=1).values < 1e-6).all())
    require(not one, "each centre has become a single pixel: it must be the mean of all that are nearest to it")
    summed = torch.stack([pixels[nearest == k].sum(dim=0) for k in range(4)])
    require(not torch.allclose(got[:4], summed, atol=1e-5), "a centre is the sum of its pixels, not their mean")
    require_close(got, expected, "a centre is wrong")


def check_bits_per_pixel(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Base 2, the softmax over the colours, and the mean over pixels."""
    logits, ids = 2 * torch.randn(3, 10, 6), torch.randint(6, (3, 10))
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")  # (3, 10)
    got = answer(logits, ids)
    require(not isinstance(got, float), "it returned a float: leave it a tensor")
    each = isinstance(got, Tensor) and got.ndim > 0
    require(not each, "it returned a number for each pixel or image: their mean is asked for")
    got = require_tensor(got, ())
    bits = nats / math.log(2)
    over_pixels = -logits.softmax(dim=1).gather(-1, ids[..., None]).log2().mean()
    wrong = {
        "these are nats: divide by ln 2, or take log2": nats.mean(),
        "these are nats times ln 2: divide by it": (nats * math.log(2)).mean(),
        "the sign is wrong: the logarithm of a probability is negative, a surprise is positive": -bits.mean(),
        "it is the sum over the pixels: take the mean": bits.sum(),
        "it is the bits of an image: divide by its number of pixels": bits.sum(dim=1).mean(),
        "it is the log of the mean probability: take the mean of the logs": -(-nats).exp().mean().log2(),
        "the softmax runs over the pixels: it must run over the colours, the last axis": over_pixels,
        "the logits are not normalized: where is the softmax?": -logits.gather(-1, ids[..., None]).mean(),
    }
    for message, other in wrong.items():
        require(not torch.allclose(got.float(), other, atol=1e-4), message)
    require_close(got, bits.mean(), "the number is wrong")
