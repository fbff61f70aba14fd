"""Choosing the next token from logits: small pure functions, each from logits to logits, then one draw.

B rows, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.generate.request import Sampling


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Only the k most likely tokens (Fan et al. 2018)."""
    least = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest tokens that together have probability p, one at least (nucleus; Holtzman et al. 2020)."""
    ordered, places = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)  # the mass of all likelier tokens
    before[..., 0] = 0
    cut = (before >= p).index_fill(-1, torch.tensor([0], device=logits.device), False)
    return logits.masked_fill(cut.scatter(-1, places, cut), -torch.inf)


def choose(logits: Tensor, how: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token per row: (B, V) -> (B,)."""
    if how.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / how.temperature
    if how.top_k is not None:
        logits = keep_top_k(logits, how.top_k)
    if how.top_p < 1:
        logits = keep_top_p(logits, how.top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
