"""The choice of the next tokens on the device, and the numbers of the next step.

B rows, V vocabulary, C parts of it
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from heedful.kernels.cuda.device_sampling import RowSampling
from heedful.kernels.cuda.layers import launch_options
from heedful.kernels.cuda.triton_sampling import choose_highest, draw_token, part_maxima

PART = 2048  # logits that one program looks through


def choose_tokens(logits: Tensor, numbers: Tensor, chosen: Tensor, rows: RowSampling) -> None:
    """The next token of logits (B, V) by each row's parameters: it, its row's highest logit after penalties and its
    scores to `chosen` (2 or more, B) in float64, it and the next length to `numbers` (2, B)."""
    x = rows.penalize(logits) if rows.kind.penalties else logits
    choose_greedy(x, numbers, chosen)
    if rows.kind.draws:
        masses = rows.cumulative_masses(x)
        draw_token[(len(x),)](
            masses, rows.uniforms, rows.params, numbers, chosen, rows.n_tokens, BITS=rows.uniforms.shape[1],
            num_warps=1,
        )  # fmt: skip
    if rows.kind.penalties:
        rows.count(numbers[0])
    if rows.kind.scores:
        chosen[2:] = rows.scores(logits, numbers[0])


def choose_greedy(logits: Tensor, numbers: Tensor, chosen: Tensor) -> None:
    """The most likely token of logits (B, V), of equals the lowest id: it and its logit to `chosen` (2 or more, B) in
    float64, it and the next length to `numbers` (2, B)."""
    n_rows, n_tokens = logits.shape
    n_parts = triton.cdiv(n_tokens, PART)
    tops = torch.empty(n_rows, n_parts, device=logits.device)
    ids = torch.empty(n_rows, n_parts, dtype=torch.long, device=logits.device)
    options = launch_options(n_rows)
    part_maxima[(n_rows, n_parts)](logits, tops, ids, n_tokens, n_parts, PART=PART, **options)
    padded = triton.next_power_of_2(n_parts)
    choose_highest[(n_rows,)](tops, ids, numbers, chosen, n_rows, n_parts, C_PADDED=padded, num_warps=1, **options)
