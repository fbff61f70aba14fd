"""Log-probabilities of what a model learns to prefer, and those of the reference that it may not stray far from: what
DPO and GRPO share.

The reference is the model before training: a frozen copy of it, or, if low-rank adapters alone are trained, the model
itself with its adapters off, which needs no memory.

    N rows, T positions, V vocabulary
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.data.dataset import IGNORED
from heedful.models.base import Batch, Model
from heedful.nn.lora import adapted, adapters_off
from heedful.train.loss import CHUNK, largest_dim, target_rows
from heedful.train.objectives import has_separate_head, required_targets


def choices_as_rows(batch: Batch) -> Batch:
    """Choices (B, C, T) with their targets as rows (B·C, T)."""
    rows = batch.flattened()
    return Batch(rows.tokens, rows.lengths, targets=required_targets(batch).flatten(0, 1))


def target_log_probs(model: Model, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    """The log-probability (N, T) of each target under the model, 0 where there is none. Logits are of the rows with a
    target alone, and of a large vocabulary in chunks that are recomputed in backward."""
    targets = required_targets(batch)
    rows = target_rows(targets)
    wanted = targets.flatten()[rows]
    head: nn.Module = nn.Identity()
    if has_separate_head(model):
        head, hidden = model.get_submodule("head"), model.hidden(batch)  # type: ignore[operator]
    else:
        hidden = model(batch).logits
    x = hidden.flatten(0, 1)[rows]
    part = partial(_log_probs, head, temperature)
    n = max(1, CHUNK.get(x.device.type, CHUNK["cuda"]) // (4 * largest_dim(head)))
    if len(x) <= n or isinstance(head, nn.Identity):
        found = part(x, wanted)
    else:
        chunks = zip(x.split(n), wanted.split(n), strict=True)
        found = torch.cat([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks])
    return found.new_zeros(targets.numel()).index_put((rows,), found).view(targets.shape)


def _log_probs(head: nn.Module, temperature: float, x: Tensor, targets: Tensor) -> Tensor:
    logits = head(x)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # (C, V)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


@torch.no_grad()
def reference_log_probs(model: Model, reference: Model | None, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    """The log-probability (N, T) of each target under the reference; without one, under the model with its adapters
    off."""
    if reference is not None:
        if reference.device != batch.ids.device:
            reference.to(batch.ids.device)
        return target_log_probs(reference, batch, temperature=temperature)
    if not adapted(model):
        raise ValueError("a model is compared with what it was before training: give its reference, or train adapters")
    with adapters_off(model):
        return target_log_probs(model, batch, temperature=temperature)


def frozen(reference: Model | None) -> Model | None:
    """A reference in evaluation mode that does not learn."""
    return None if reference is None else reference.eval().requires_grad_(False)


def count_targets(targets: Tensor) -> Tensor:
    """The targets of each row: (..., T) -> (...)."""
    return (targets != IGNORED).sum(dim=-1)
