"""The exercises of *Scaling, and what 175 billion parameters cost*."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from heedful.lessons.checking import require


def check_gpt_parameters(answer: Callable[[int, int, int, int], int]) -> None:
    """Every term of the count, for sizes at which no two mistakes look alike."""
    for layers, width, vocabulary, context in ((3, 20, 700, 50), (12, 768, 50257, 1024)):
        right = layers * (12 * width**2 + 13 * width) + (vocabulary + context + 2) * width
        got: Any = answer(layers, width, vocabulary, context)
        require(got is not None, "it returned None: is there a `return`?")
        mistakes = {
            12 * layers * width**2: "only the matrices of the layers are counted",
            right - 13 * layers * width: "the biases and norms of the layers are missing: 13 d for each",
            right - 9 * layers * width: "the biases of the layers are missing: 9 d for each",
            right - 4 * layers * width: "the two norms of each layer are missing: 2 d each, a scale and a shift",
            right - 12 * (layers - 1) * width**2 - 13 * (layers - 1) * width: "one layer is counted, not all",
            right - vocabulary * width: "the token embedding is missing",
            right - context * width: "the embedding of positions is missing",
            right - 2 * width: "the last norm is missing: 2 d",
            right + vocabulary * width: "the head is counted: it is the token embedding, used a second time",
            right - 8 * layers * width**2: "the feed-forward part is missing: two matrices of d x 4d, 8 d²",
            right - 6 * layers * width**2: "the feed-forward part is 4d wide, so that its two matrices have 8 d²",
        }
        require(got not in mistakes, mistakes.get(got, ""))
        shown = (layers, width, vocabulary, context)
        require(got == right, f"for (L, d, V, T) = {shown} it is {got:,}, and there are {right:,}")
        require(isinstance(got, int), f"it returned a {type(got).__name__}: a number of parameters is an int")


def check_compute_optimal(answer: Callable[[float, float, float, float, float], tuple[float, float]]) -> None:
    """6ND = C, and no other size is better."""
    c, a, b, alpha, beta = 6e20, 300.0, 900.0, 0.3, 0.4
    got: Any = answer(c, a, b, alpha, beta)
    require(got is not None, "it returned None: is there a `return`?")
    pair = isinstance(got, tuple | list) and len(got) == 2
    require(pair, f"it must return two numbers, parameters and tokens, and returned {got!r}")
    n, d = float(got[0]), float(got[1])
    require(n > 0 and d > 0, f"{n:.3g} parameters and {d:.3g} tokens: both must be more than 0")
    require(not math.isclose(n * d, c, rel_tol=1e-3), "N D is C: a token costs 6 operations per parameter")
    require(math.isclose(6 * n * d, c, rel_tol=1e-3), f"6 N D is {6 * n * d:.3g}, and the budget is {c:.3g}")

    def best(a: float, b: float, alpha: float, beta: float) -> float:
        return float((alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (c / 6) ** (beta / (alpha + beta)))

    def is_size(other: float) -> bool:
        return math.isclose(n, other, rel_tol=1e-3)

    right = best(a, b, alpha, beta)
    require(not is_size(c / 6 / right), "parameters and tokens have changed places")
    require(
        not is_size((alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (c / 6) ** (alpha / (alpha + beta))),
        "the exponent of C / 6 is beta / (alpha + beta) for the parameters: alpha's is for the tokens",
    )
    without = (a / b) ** (1 / (alpha + beta)) * (c / 6) ** (beta / (alpha + beta))
    require(not is_size(without), "the derivative of A / N^alpha has the factor alpha too, that of B / D^beta beta")
    require(not is_size(math.sqrt(c / 6)), "parameters and tokens are equal: the constants have no part in it")
    require(not is_size(math.sqrt(c / 120)), "20 tokens for each parameter is a result for other constants: derive it")

    def loss(n: float) -> float:
        return a / n**alpha + b / (c / 6 / n) ** beta

    require(
        is_size(right),
        f"{n:.3g} parameters give {loss(n):.4f}, {right:.3g} would give {loss(right):.4f}: set the derivative to 0",
    )
