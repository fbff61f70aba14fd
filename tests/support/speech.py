"""What a model says, found the plain way."""

from __future__ import annotations

import torch

from heedful.generate.request import Request
from heedful.generate.sampling import Sampler, sample
from heedful.models.base import Batch


@torch.no_grad()
def plainly(model, request: Request, index: int = 0) -> list[int]:
    """The tokens without a cache, an engine or a batch: the whole text through `forward` for each token."""
    sampler = Sampler(request.sampling, request.prompt, index)
    read = list(request.prompt) or [model.start_id]
    source = None if request.source is None else torch.tensor([request.source])
    said: list[int] = []
    while len(said) < request.max_tokens and (model.longest is None or len(read) <= model.longest):
        logits = model(Batch(torch.tensor([read]), source=source)).logits[:, -1]
        (token,) = sample(logits, [sampler])
        if token in request.stop_ids:
            break
        said.append(token)
        read.append(token)
    return said
