"""Generation without a cache, an engine or a batch: the reference for all of them."""

from __future__ import annotations

import torch

from heedful.generate.request import Request
from heedful.generate.sampling import Sampler, sample
from heedful.models.base import Batch


@torch.no_grad()
def generate_uncached(model, request: Request, index: int = 0) -> list[int]:
    """The tokens of a request, by the whole text through `forward` for each token."""
    sampler = Sampler(request.sampling, request.prompt, index)
    ids = list(request.prompt) or [model.start_id]
    source = None if request.source is None else torch.tensor([request.source])
    tokens: list[int] = []
    while len(tokens) < request.max_tokens and (model.context_length is None or len(ids) <= model.context_length):
        logits = model(Batch(torch.tensor([ids]), source=source)).logits[:, -1]
        (token,) = sample(logits, [sampler])
        if token in request.stop_ids:
            break
        tokens.append(token)
        ids.append(token)
    return tokens
