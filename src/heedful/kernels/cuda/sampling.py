"""The choice of the next tokens on the device, and the numbers of the next step.

B rows, V vocabulary, C parts of it
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from heedful.kernels.cuda.layers import launch_options
from heedful.kernels.cuda.triton_sampling import choose_highest, part_maxima

PART = 2048  # logits that one program looks through


def choose_greedy(logits: Tensor, numbers: Tensor, chosen: Tensor) -> None:
    """The most likely token of logits (B, V), of equals the lowest id: it and its logit to `chosen` (2, B) in float64,
    it and the next length to `numbers` (2, B)."""
    n_rows, n_tokens = logits.shape
    n_parts = triton.cdiv(n_tokens, PART)
    tops = torch.empty(n_rows, n_parts, device=logits.device)
    ids = torch.empty(n_rows, n_parts, dtype=torch.long, device=logits.device)
    options = launch_options(n_rows)
    part_maxima[(n_rows, n_parts)](logits, tops, ids, n_tokens, n_parts, PART=PART, **options)
    padded = triton.next_power_of_2(n_parts)
    choose_highest[(n_rows,)](tops, ids, numbers, chosen, n_rows, n_parts, C_PADDED=padded, num_warps=1, **options)
