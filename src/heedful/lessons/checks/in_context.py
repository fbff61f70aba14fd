"""The exercises of *Examples in the prompt*."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heedful.lessons.checking import require, require_close, require_tensor

Examples = Sequence[tuple[str, str]]


def check_few_shot_prompt(answer: Callable[[Examples, str], str]) -> None:
    """Form, order, and an end at which the label comes next; with no example too."""
    examples = [("Fine music.", "positive"), ("Too long.", "negative"), ("A gem.", "positive")]
    solved = [f"Review: {review}\nSentiment: {label}" for review, label in examples]
    opened = "Review: So so.\nSentiment:"
    expected = "\n\n".join([*solved, opened])
    got = answer(examples, "So so.")
    require(got is not None, "it returned None: is there a `return`?")
    require(isinstance(got, str), f"it returned a {type(got).__name__}, not a text")
    require("So so." in got, "the query is not in the prompt")
    require(not got.endswith(" "), "it ends with a space, which belongs to the first token of the label")
    require(not got.endswith("\n"), "it ends with a new line: the label stands on the line of its name")
    require(got.endswith("Sentiment:"), f"it must end with 'Sentiment:', where the label comes; it ends {got[-12:]!r}")
    require(got != "\n\n".join([*solved[::-1], opened]), "the examples are in reverse order")
    require(
        got != "\n\n".join([solved[0], opened]), "only the first example is there: is the `return` inside the loop?"
    )
    require(
        got != "\n\n".join([solved[-1], opened]), "only the last example is there: add to the text, do not replace it"
    )
    require(got != "\n".join([*solved, opened]), "an empty line must stand between two examples")
    require(got == expected, f"it is not the form asked for: it must begin {expected[:45]!r}, and begins {got[:45]!r}")
    none = answer([], "So so.")
    require(none == opened, f"without examples it must be {opened!r}, and is {none!r}")


def check_calibrate_labels(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Divided by the mean neutral probability, with rows that sum to 1; labels need not be all that may come next."""
    scores = torch.randn(5, 3).log_softmax(dim=1) - 4 * torch.rand(5, 1)  # most of the probability is elsewhere
    neutral = (2 * torch.randn(4, 3)).log_softmax(dim=1) - 3 * torch.rand(4, 1)
    p, rows = scores.softmax(dim=1), neutral.softmax(dim=1)

    def normalized(ratio: Tensor) -> Tensor:
        return ratio / ratio.sum(dim=1, keepdim=True)

    got = require_tensor(answer(scores.clone(), neutral.clone()), (5, 3))
    require(bool((got >= 0).all()), "a probability is negative: are these logarithms?")

    def same(other: Tensor) -> bool:
        return torch.allclose(got, other, atol=1e-4)

    require(not same(p / rows.mean(dim=0)), "the rows do not sum to 1: normalize after the division")
    require_close(got.sum(dim=1), torch.ones(5), "the rows do not sum to 1")
    require(not same(p), "nothing is calibrated: these are the labels' own probabilities")
    require(not same(normalized(p * rows.mean(dim=0))), "it multiplies by the bias: divide, so that it goes away")
    require(
        not same(normalized(p / neutral.exp().mean(dim=0))),
        "normalize each neutral row over the labels before the mean: else the row where labels are likeliest rules",
    )
    require(
        not same(normalized(p / neutral.mean(dim=0).exp())) and not same(normalized(p / rows.log().mean(dim=0).exp())),
        "it averages logarithms: the mean is over probabilities",
    )
    require(not same(normalized(p / rows[0])), "only the first neutral input is used: take the mean of all")
    require_close(got, normalized(p / rows.mean(dim=0)), "a probability is wrong")
