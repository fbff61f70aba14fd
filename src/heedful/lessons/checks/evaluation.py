"""The exercises of *Evaluation, and what a table says*."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.lessons.checking import require


def _number(value: Any, about: str = "a number") -> float:
    require(value is not None, "it returned None: is there a `return`?")
    single = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    require(single, f"it must return {about}, and returned {value!r}")
    require(math.isfinite(float(value)), f"it returned {float(value)}, which is not finite")
    return float(value)


def check_bits_per_byte(answer: Callable[[Tensor, str], float]) -> None:
    """Bits, not nats; bytes, not characters or tokens; a sum that is positive."""
    text = "Où est l'été ? Über den Bergen."  # some characters have two bytes
    logprobs = -3 * torch.rand(9) - 0.1
    got = _number(answer(logprobs, text))
    nats = float(-logprobs.sum())
    n_bytes = len(text.encode("utf-8"))
    right = nats / math.log(2) / n_bytes
    mistakes = {
        -right: "it is negative: the cost of a token is minus the logarithm of its probability",
        nats / n_bytes: "these are nats per byte: divide by ln 2 for bits",
        nats * math.log(2) / n_bytes: "it multiplies by ln 2: log2 p is ln p divided by ln 2",
        nats / math.log(2) / len(text): "these are bits per character: é is one character and two bytes",
        nats / math.log(2) / 9: "these are bits per token: divide by the bytes of the text",
        nats / math.log(2) / 9 / n_bytes: "it takes the mean over tokens: the cost of a text is their sum",
        nats / math.log(2): "these are the bits of the whole text: divide by its bytes",
    }
    for value, message in mistakes.items():
        require(not math.isclose(got, value, rel_tol=1e-4), message)
    require(math.isclose(got, right, rel_tol=1e-3), f"it is {got:.4f}, and should be {right:.4f}")


def check_choose_ending(answer: Callable[[Tensor, Sequence[str]], int]) -> None:
    """The highest log-probability per character, where every other rule chooses another ending."""
    endings = ["no.", "a good deal longer than that.", "so it was so.", "quite long, it was"]
    scores = torch.tensor([-6.0, -40.0, -15.6, -18.0])  # per character: -2, -1.38, -1.2, -1
    got = answer(scores, endings)
    require(not isinstance(got, str), "it returned an ending: its place is asked for")
    place = _number(got, "one place")
    rules = {
        0: "this is the highest sum, which prefers short endings: divide by their length",
        1: "this is the lowest or the longest: the highest score per character is asked for",
        2: "it divides by the number of words: characters are asked for",
    }
    require(place not in rules, rules.get(int(place), ""))
    require(place == 3, f"it chose {place:g}, and the place of the best is 3")
    alone = _number(answer(scores[1:3], endings[1:3]), "one place")
    require(alone == 1, f"of two endings with -1.38 and -1.2 per character it chose {alone:g}: the second is at 1")


def check_difference_interval(answer: Callable[[float, float, int], tuple[float, float]]) -> None:
    """q - p in the middle, both variances added, 1.96 standard deviations to both sides."""
    p, q, n = 0.62, 0.71, 800
    got: Any = answer(p, q, n)
    require(got is not None, "it returned None: is there a `return`?")
    pair = isinstance(got, tuple | list) and len(got) == 2
    require(pair, f"it must return two numbers, low and high, and returned {got!r}")
    low, high = float(got[0]), float(got[1])
    require(low <= high, "low is above high")
    middle, half = (low + high) / 2, (high - low) / 2

    def is_half(other: float) -> bool:
        return math.isclose(half, other, rel_tol=1e-3)

    require(not math.isclose(middle, p - q, rel_tol=1e-3), "it is the interval of p - q: q - p is asked for")
    require(math.isclose(middle, q - p, rel_tol=1e-3), f"its middle is {middle:.4f}, and q - p is {q - p:.4f}")
    a, b = p * (1 - p) / n, q * (1 - q) / n
    z = 1.96
    require(not is_half(math.sqrt(a + b)), "it is one standard deviation to both sides: 95 % are 1.96 of them")
    require(not is_half(z * (a + b)), "the root is missing: the standard deviation is the root of the variance")
    wider = "it adds the standard deviations: variances add, and the root comes after"
    require(not is_half(z * (math.sqrt(a) + math.sqrt(b))), wider)
    require(not is_half(z * math.sqrt(a)) and not is_half(z * math.sqrt(b)), "it has the variance of one share alone")
    require(not is_half(z * math.sqrt((a + b) * n)), "the number of items is missing: p (1 - p) / n")
    require(not is_half(z * math.sqrt((a + b) / 2)), "both variances count in full: there are n items for each")
    expected = z * math.sqrt(a + b)
    require(is_half(expected), f"it is {half:.4f} to both sides, and should be {expected:.4f}")
