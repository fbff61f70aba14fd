"""The exercises of the lesson on BERT: hidden words, and the loss of them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from heedful.lessons.checking import require, require_close, require_tensor

NO_TARGET = -100


def check_corrupted(answer: Callable[..., Any]) -> None:
    """Input and targets of masked tokens: [MASK], a random token, or the token itself."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(10, 500, (6, 40), generator=generator)
    chosen = torch.rand(6, 40, generator=generator) < 0.3
    fate = torch.rand(6, 40, generator=generator)
    random_ids = torch.randint(500, 900, (6, 40), generator=generator)
    mask_id = 4
    before = ids.clone()
    made = answer(ids, chosen, fate, random_ids, mask_id)
    require(isinstance(made, tuple) and len(made) == 2, "return two tensors: the input and the targets")
    require(torch.equal(ids, before), "it changes the `ids` that it is given: work on a copy, or use torch.where")
    inputs, targets = (
        require_tensor(x, (6, 40), name) for x, name in zip(made, ("the input", "the targets"), strict=True)
    )
    require(
        torch.equal(inputs[~chosen], ids[~chosen]), "a token that was not chosen is changed: only `chosen` ones may be"
    )
    require(bool((targets[~chosen] == NO_TARGET).all()), "a token that was not chosen has a target: it must be -100")
    require(
        not torch.equal(targets[chosen], inputs[chosen]),
        "the targets are the tokens after hiding: they are the true ones",
    )
    require(torch.equal(targets[chosen], ids[chosen]), "a chosen token's target is the token that stood there before")
    kinds = {
        "a fate below 0.8 becomes [MASK]": (fate < 0.8, torch.full_like(ids, mask_id)),
        "a fate from 0.8 to below 0.9 becomes the random token": ((fate >= 0.8) & (fate < 0.9), random_ids),
        "a fate of 0.9 or more leaves the token as it is, and it is a target all the same": (fate >= 0.9, ids),
    }
    for rule, (where, expected) in kinds.items():
        where = where & chosen
        require(torch.equal(inputs[where], expected[where]), rule)


def check_masked_loss(answer: Callable[..., Any]) -> None:
    """The mean cross-entropy over the positions with a target."""
    generator = torch.Generator().manual_seed(8)
    logits = 3 * torch.randn(4, 12, 30, generator=generator)
    ids = torch.randint(0, 30, (4, 12), generator=generator)
    targets = torch.where(torch.rand(4, 12, generator=generator) < 0.25, ids, NO_TARGET)
    n = int((targets != NO_TARGET).sum())
    loss = require_tensor(answer(logits, targets.clone()), ())
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)

    def near(other: torch.Tensor) -> bool:
        return bool((loss - other).abs() < 1e-4)

    require(not near(expected * n), "that is the sum over the targets: divide by how many there are")
    require(
        not near(expected * n / targets.numel()),
        "that is the sum over the targets divided by all positions: divide by the targets alone",
    )
    shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=NO_TARGET)
    require(
        not near(shifted),
        "that compares each position with the next token, as GPT does: BERT's targets stand in their own place",
    )
    require(not near(-expected), "the sign is wrong: a loss is minus the log-probability")
    require_close(loss, expected, "it is not the mean of -log p(target) over the positions with a target")
