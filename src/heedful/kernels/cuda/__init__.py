"""Decoding on a GPU: Triton kernels for a decoder's blocks (decode.py), CUDA graphs of whole decode steps (graphs.py).
In training, the loss over the vocabulary (cross_entropy.py).

Triton comes with PyTorch's builds for CUDA. It is imported here only where a model is on such a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heedful.models.base import DecoderModel, EncoderDecoderModel, GenerativeModel
from heedful.nn.feedforward import MixtureOfExperts
from heedful.nn.head import LanguageHead
from heedful.nn.paged import BlockPool
from heedful.nn.position import Alibi
from heedful.nn.state import KeyValueState

if TYPE_CHECKING:
    from heedful.kernels.cuda.graphs import DecodeGraphs

# logits, targets, size of the vocabulary, soft cap, smoothing -> losses, gradient of the logits
CrossEntropy = Callable[[Tensor, Tensor, int, float | None, float], tuple[Tensor, Tensor]]


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def few_rows_linear(layer: nn.Module, x: Tensor) -> Tensor | None:
    """x (..., K) through a packed linear layer by one kernel, for few enough rows; None for more."""
    from heedful.kernels.cuda.layers import MAX_ROWS, Product

    rows = x.reshape(-1, x.shape[-1])
    if not 0 < len(rows) <= MAX_ROWS:
        return None
    product = Product.of(layer)
    return product(rows.contiguous(), x.new_empty(len(rows), product.n_outputs)).view(*x.shape[:-1], -1)


def accelerate_decoder(model: GenerativeModel[Any]) -> None:
    """Let the kernels compute decode steps of a packed decoder, in place, as far as they support its modules."""
    if model.device.type == "cuda" and has_triton() and isinstance(model, DecoderModel):
        from heedful.kernels.cuda.decode import CudaHead, CudaStack

        CudaStack.replace(model.decoder)
        if isinstance(model.head, LanguageHead):
            CudaHead.replace(model.head)


def is_on_gpu(model: GenerativeModel[Any]) -> bool:
    """Whether a model's parameters are on one CUDA device."""
    return any(p.is_cuda and not hasattr(p, "to_local") for p in model.parameters())


def supports_graphs(model: GenerativeModel[Any]) -> bool:
    """Whether decode steps can be recorded as CUDA graphs: routing to experts asks the host where tokens go, LongRoPE
    recomputes a row at its switch length, ALiBi's slopes are numbers in Python, weights that are divided over processes
    (DTensor) are communicated, and the kernels read no int8 KV cache."""
    return (
        is_on_gpu(model)
        and has_triton()
        and isinstance(model, DecoderModel | EncoderDecoderModel)
        and isinstance(model.head, LanguageHead)
        and type(model.new_state(0, 0)) is KeyValueState
        and not isinstance(model.decoder.bias, Alibi)
        and model.kv_cache is None
        and not any(isinstance(module, MixtureOfExperts) for module in model.modules())
    )


def decode_graphs(model: GenerativeModel[Any], pool: BlockPool | None) -> DecodeGraphs | None:
    """The graphs of a model's decode steps on a pool's blocks; None where there can be none."""
    if pool is None or not supports_graphs(model):
        return None
    from heedful.kernels.cuda.graphs import DecodeGraphs

    assert isinstance(model, DecoderModel | EncoderDecoderModel)
    return DecodeGraphs(model, pool)


def fused_cross_entropy(device: torch.device) -> CrossEntropy | None:
    """Cross-entropy and its gradient by one kernel, on this device; None where there is none."""
    if device.type != "cuda" or not has_triton():
        return None
    from heedful.kernels.cuda.cross_entropy import cross_entropy_in_place

    return cross_entropy_in_place
