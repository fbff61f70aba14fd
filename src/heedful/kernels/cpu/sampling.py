"""Argmax and top-p over rows of logits by C kernels, without sorting the vocabulary.

B rows, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels.cpu.library import library

PAGE = 256  # neighbouring logits whose probabilities `page_masses` sums


def supports_logits(logits: Tensor) -> bool:
    """Whether the functions below take these logits."""
    return (
        logits.ndim == 2
        and logits.dtype == torch.float32
        and logits.device.type == "cpu"
        and logits.is_contiguous()
        and logits.numel() > 0
        and library() is not None
    )


def row_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row (B, V) and the first index that has it, each (B,); NaN where a row has one."""
    n_rows, n_tokens = logits.shape
    values, indices = logits.new_empty(n_rows), torch.empty(n_rows, dtype=torch.long)
    lib = library()
    assert lib is not None
    lib.row_argmax(
        logits.data_ptr(), n_rows, n_tokens, values.data_ptr(), indices.data_ptr(), torch.get_num_threads()
    )  # fmt: skip
    return values, indices


def top_p_cutoff(logits: Tensor, maxima: Tensor, inverse_temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """The nucleus of each row (B, V), as a lowest logit (B,), and the last index (B,) of those equal to it that are in.

    It is the fewest logits, greatest first, with top_p of the sum of e^((logit - maximum) / temperature).
    """
    n_rows, n_tokens = logits.shape
    cutoffs, last = logits.new_empty(n_rows), torch.empty(n_rows, dtype=torch.long)
    lib = library()
    assert lib is not None
    done = lib.top_p_cutoff(
        logits.data_ptr(), maxima.data_ptr(), n_rows, n_tokens, inverse_temperature, top_p, cutoffs.data_ptr(),
        last.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if not done:
        raise MemoryError("no memory to sort logits")
    return cutoffs, last


def page_masses(
    logits: Tensor, maxima: Tensor, inverse_temperature: float, cutoff: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The unnormalized probability of every 256 logits of a row (B, V), or of those in its nucleus: (B, V/256)."""
    n_rows, n_tokens = logits.shape
    masses = logits.new_empty(n_rows, -(-n_tokens // PAGE))
    cutoffs, last = (None, None) if cutoff is None else (cutoff[0].data_ptr(), cutoff[1].data_ptr())
    lib = library()
    assert lib is not None
    lib.page_masses(
        logits.data_ptr(), maxima.data_ptr(), n_rows, n_tokens, inverse_temperature, cutoffs, last, masses.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return masses
