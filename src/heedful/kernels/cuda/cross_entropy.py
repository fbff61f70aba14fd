"""Cross-entropy and its gradient by one kernel, in the place of the logits (train/loss.py has the plain one).

C rows, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels.cuda.triton_loss import cross_entropy_rows

BLOCK = 4096  # logits that a program looks at at once


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, n: int, softcap: float | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy (C,) of the first n logits (C, V padded) in float32, and its gradient with respect to the logits
    before their soft cap, which takes their place and type; 0 for the padding."""
    assert logits.is_contiguous() and targets.is_contiguous()
    losses = torch.empty(len(logits), device=logits.device)
    cross_entropy_rows[(len(logits),)](
        logits, targets, losses, n, logits.shape[1], softcap or 1.0, smoothing, SOFTCAP=softcap is not None,
        SMOOTHING=smoothing > 0, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return losses, logits
