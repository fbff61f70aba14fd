"""The exercises of the lesson on layers: features made of them, and the baseline that remembers words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from heedful.lessons.checking import require, require_close, require_tensor


def check_word_features(answer: Callable[..., Any]) -> None:
    """BERT's combinations of layers."""
    generator = torch.Generator().manual_seed(5)
    layers = torch.randn(9, 5, 6, generator=generator)
    single = {"first": (0, "what enters the first layer, row 0"), "last": (8, "the last row"),
              "second_to_last": (7, "the row before the last")}  # fmt: skip
    for which, (row, reason) in single.items():
        require_close(answer(layers.clone(), which), layers[row], f"{which!r} is {reason}")
    made = require_tensor(answer(layers.clone(), "sum_all"), (5, 6), "'sum_all'")
    with_embeddings = bool((made - layers.sum(dim=0)).abs().max() < 1e-4)
    require(not with_embeddings, "'sum_all' leaves out row 0, which is the embeddings")
    require(not bool((made - layers[1:].mean(dim=0)).abs().max() < 1e-4), "'sum_all' is a sum, and that is a mean")
    require_close(made, layers[1:].sum(dim=0), "'sum_all' is the sum of rows 1 to the last")
    require_close(
        answer(layers.clone(), "sum_last_four"), layers[-4:].sum(dim=0), "'sum_last_four' adds the last four rows"
    )
    made = answer(layers.clone(), "concat_last_four")
    if isinstance(made, torch.Tensor) and tuple(made.shape) == (20, 6):
        require(False, "'concat_last_four' is (20, 6): concatenate along the features, dim=-1, not along the tokens")
    made = require_tensor(made, (5, 24), "'concat_last_four'")
    orders = [torch.cat(list(rows), dim=-1) for rows in (layers[-4:], layers[-4:].flip(0))]  # either order is good
    require(
        any(bool((made - order).abs().max() < 1e-5) for order in orders),
        "'concat_last_four' puts the last four rows side by side, each token's features together",
    )


def check_by_memory(answer: Callable[..., Any]) -> None:
    """The most frequent tag of each word, O for unknown ones."""
    known = [
        (["Paris", "met", "Anna", "."], ["B-PER", "O", "B-PER", "O"]),
        (["Anna", "left", "Paris", "."], ["B-PER", "O", "B-LOC", "O"]),
        (["Paris", "is", "large", "."], ["B-LOC", "O", "O", "O"]),
    ]
    made = answer(known, ["Anna", "saw", "Paris", "."])
    require(made is not None, "it returned None: is there a `return`?")
    made = list(made)
    require(len(made) == 4, f"it made {len(made)} tags of 4 words")
    require(made[2] != "B-PER", "Paris is B-LOC twice and B-PER once: the most frequent tag, not the first")
    require(made[1] == "O", f"*saw* does not occur in the known sentences: O, not {made[1]!r}")
    require(made == ["B-PER", "O", "B-LOC", "O"], f"of Anna saw Paris . it made {made}")
    made = list(answer(known, ["paris"]))
    require(made == ["O"], "words are known as they are written: *paris* is not *Paris*")
