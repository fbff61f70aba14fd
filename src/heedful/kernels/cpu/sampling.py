"""Argmax and top-p over rows of logits by C kernels, without sorting the vocabulary.

B rows, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels.cpu.library import library

PAGE = 256  # adjacent logits whose probabilities `page_masses` sums


def supports_logits(logits: Tensor) -> bool:
    """Whether the functions below support these logits: contiguous float32 (B, V) on a CPU."""
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
    """The top-p set (nucleus) of each row (B, V), as its lowest logit (B,) and the last index (B,) among ties with it.

    It has the fewest logits, greatest first, whose e^((logit - maximum) / temperature) reach top_p of the total.
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
    """Unnormalized probability of every 256 logits of a row (B, V), or of those in its top-p set: (B, V/256)."""
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
